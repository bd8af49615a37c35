// kafkajs at work on a broker: administration, every codec that it brings, groups, and their end.
// Argument: the broker's address. Writes a line "PASS name" or "FAIL name: why" for each part.

import kafkajs from "kafkajs";

const { CompressionTypes, ConfigResourceTypes, Kafka, logLevel } = kafkajs;

const kafka = new Kafka({
  clientId: "kafkajs-suite",
  brokers: [process.argv[2]],
  logLevel: logLevel.NOTHING,
  retry: { initialRetryTime: 50, retries: 8 },
});
const PATIENCE_MS = 30_000;

function equal(found, expected) {
  const [one, other] = [found, expected].map((each) => JSON.stringify(each));
  if (one !== other) throw new Error(`${one} instead of ${other}`);
}

async function until(condition, what) {
  const deadline = Date.now() + PATIENCE_MS;
  while (!(await condition())) {
    if (Date.now() > deadline) throw new Error(`not in time: ${what}`);
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
}

async function created(admin, topic, numPartitions = 1, configEntries = []) {
  equal(await admin.createTopics({ waitForLeaders: true, topics: [{ topic, numPartitions, configEntries }] }), true);
}

async function produced(topic, messages, options = {}) {
  const producer = kafka.producer(options.producer);
  await producer.connect();
  try {
    return await producer.send({ topic, messages, ...options.send });
  } finally {
    await producer.disconnect();
  }
}

// Runs members of a group until all of them together were given so many records.
async function consumed(groupId, topic, count, { members = 1, ...run } = {}) {
  const found = [];
  const consumers = Array.from({ length: members }, () =>
    kafka.consumer({ groupId, sessionTimeout: 10_000, heartbeatInterval: 500, maxWaitTimeInMs: 100 }),
  );
  try {
    for (const each of consumers) {
      await each.connect();
      await each.subscribe({ topics: [topic], fromBeginning: true });
      await each.run({
        eachMessage: async ({ partition, message }) => found.push({ partition, ...message }),
        ...run,
      });
    }
    await until(() => found.length >= count, `${count} records, of which there are ${found.length}`);
    return found;
  } finally {
    for (const each of consumers) await each.disconnect();
  }
}

const PARTS = {
  async topics(admin) {
    await created(admin, "js-topics", 3, [{ name: "retention.ms", value: "100000" }]);
    equal(await admin.createTopics({ topics: [{ topic: "js-topics" }] }), false);
    equal((await admin.listTopics()).includes("js-topics"), true);
    const { topics } = await admin.fetchTopicMetadata({ topics: ["js-topics"] });
    equal(topics[0].partitions.length, 3);
    await admin.createPartitions({ topicPartitions: [{ topic: "js-topics", count: 5 }] });
    // A new partition has no leader for a moment, with Kafka.
    const offsets = () => admin.fetchTopicOffsets("js-topics").catch(() => []);
    await until(async () => (await offsets()).length === 5, "five partitions");
    const described = await admin.describeConfigs({
      includeSynonyms: false,
      resources: [{ type: ConfigResourceTypes.TOPIC, name: "js-topics", configNames: ["retention.ms"] }],
    });
    equal(described.resources[0].configEntries[0].configValue, "100000");
    await admin.alterConfigs({
      validateOnly: false,
      resources: [
        { type: ConfigResourceTypes.TOPIC, name: "js-topics", configEntries: [{ name: "retention.ms", value: "200000" }] },
      ],
    });
    await admin.deleteTopics({ topics: ["js-topics"] });
    await until(async () => !(await admin.listTopics()).includes("js-topics"), "the topic is gone");
  },

  async cluster(admin) {
    const found = await admin.describeCluster();
    equal(found.brokers.length, 1);
    equal(found.controller, found.brokers[0].nodeId);
  },

  async "records as they were sent"(admin) {
    await created(admin, "js-records");
    const sent = { key: "k", value: "v", headers: { name: "one" }, timestamp: "1700000000123" };
    const [placed] = await produced("js-records", [sent, { key: "k", value: null }]);
    equal([placed.partition, placed.baseOffset, placed.errorCode], [0, "0", 0]);
    const found = await consumed("js-records", "js-records", 2);
    equal([found[0].key.toString(), found[0].value.toString(), found[0].timestamp], ["k", "v", "1700000000123"]);
    equal(found[0].headers.name.toString(), "one");
    equal(found[1].value, null);
  },

  async gzip(admin) {
    await created(admin, "js-gzip");
    const messages = Array.from({ length: 500 }, (_, number) => ({ value: `the same words ${number}` }));
    await produced("js-gzip", messages, { send: { compression: CompressionTypes.GZIP } });
    const found = await consumed("js-gzip", "js-gzip", 500);
    equal(found.map((each) => each.value.toString()), messages.map((each) => each.value));
  },

  async "an idempotent producer"(admin) {
    await created(admin, "js-idempotent");
    const producer = kafka.producer({ idempotent: true, maxInFlightRequests: 1 });
    await producer.connect();
    for (let number = 0; number < 50; number++) {
      await producer.send({ topic: "js-idempotent", messages: [{ value: `${number}` }] });
    }
    await producer.disconnect();
    const found = await consumed("js-idempotent", "js-idempotent", 50);
    equal(found.map((each) => each.offset), found.map((_, at) => `${at}`));
  },

  async "without acks"(admin) {
    await created(admin, "js-acks");
    await produced("js-acks", [{ value: "a" }], { send: { acks: 0 } });
    equal((await consumed("js-acks", "js-acks", 1)).length, 1);
  },

  async "a group of three"(admin) {
    await created(admin, "js-group", 6);
    const messages = Array.from({ length: 600 }, (_, number) => ({ key: `${number}`, value: `${number}` }));
    await produced("js-group", messages);
    const found = await consumed("js-group", "js-group", 600, { members: 3, partitionsConsumedConcurrently: 2 });
    equal(new Set(found.map((each) => each.value.toString())).size, 600);
    equal(new Set(found.map((each) => each.partition)).size, 6);
    await until(async () => {
      const { groups } = await admin.describeGroups(["js-group"]);
      return groups[0].state === "Empty";
    }, "the group is empty");
    const [{ partitions }] = await admin.fetchOffsets({ groupId: "js-group", topics: ["js-group"] });
    equal(partitions.reduce((sum, each) => sum + Number(each.offset), 0), 600);
    equal((await admin.listGroups()).groups.some((each) => each.groupId === "js-group"), true);
    await admin.resetOffsets({ groupId: "js-group", topic: "js-group", earliest: true });
    equal((await consumed("js-group", "js-group", 600)).length >= 600, true);
    equal((await admin.deleteGroups(["js-group"]))[0].errorCode, 0);
  },

  async "seeking, pausing and going on"(admin) {
    await created(admin, "js-seek");
    await produced("js-seek", Array.from({ length: 10 }, (_, number) => ({ value: `${number}` })));
    const consumer = kafka.consumer({ groupId: "js-seek", maxWaitTimeInMs: 100 });
    const found = [];
    await consumer.connect();
    await consumer.subscribe({ topics: ["js-seek"], fromBeginning: true });
    await consumer.run({ eachMessage: async ({ message }) => found.push(message.value.toString()) });
    consumer.seek({ topic: "js-seek", partition: 0, offset: "7" });
    await until(() => found.includes("9"), "the last record");
    equal(found.slice(-3), ["7", "8", "9"]);
    consumer.pause([{ topic: "js-seek" }]);
    await produced("js-seek", [{ value: "later" }]);
    consumer.resume([{ topic: "js-seek" }]);
    await until(() => found.includes("later"), "the record after the pause");
    await consumer.disconnect();
  },

  async "offsets by name and by time"(admin) {
    await created(admin, "js-offsets");
    await produced("js-offsets", [1, 2, 3].map((n) => ({ value: `${n}`, timestamp: `${n}000` })));
    const [{ low, high }] = await admin.fetchTopicOffsets("js-offsets");
    equal([low, high], ["0", "3"]);
    equal((await admin.fetchTopicOffsetsByTimestamp("js-offsets", 2000))[0].offset, "1");
    await admin.deleteTopicRecords({ topic: "js-offsets", partitions: [{ partition: 0, offset: "2" }] });
    equal((await admin.fetchTopicOffsets("js-offsets"))[0].low, "2");
  },

  async "an unknown topic"(admin) {
    const failed = await admin.fetchTopicOffsets("js-none").catch((error) => error.cause.type);
    equal(failed, "UNKNOWN_TOPIC_OR_PARTITION");
  },
};

const admin = kafka.admin();
await admin.connect();
const only = process.argv.slice(3);
for (const [name, part] of Object.entries(PARTS)) {
  if (only.length && !only.includes(name)) continue;
  try {
    await part(admin);
    console.log(`PASS ${name}`);
  } catch (error) {
    console.log(`FAIL ${name}: ${String(error.message ?? error).split("\n")[0]}`);
  }
}
await admin.disconnect();
