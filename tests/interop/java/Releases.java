/*
 * What each release of Kafka's Java clients since 2.1 can do on a broker: administration, every
 * codec, idempotent and plain producers, a group that shares and commits, seeking by offset and by
 * time, and the end of a consumer.
 *
 * Arguments: address, topic, which is made here. Ends with a line "done"; what is not as it should
 * be is an exception.
 */

import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Collections;
import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Objects;
import java.util.Properties;
import java.util.Set;
import java.util.concurrent.Future;
import org.apache.kafka.clients.admin.AdminClient;
import org.apache.kafka.clients.admin.NewPartitions;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.config.ConfigResource;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;

public class Releases {
    static final String[] CODECS = {"none", "gzip", "snappy", "lz4", "zstd"};
    static final int EACH = 60;
    static final int TOTAL = EACH * CODECS.length * 2;
    static final long AT_MS = 1_700_000_000_000L;
    static final long PATIENCE_MS = 60_000;

    static String address;
    static String topic;

    public static void main(String[] arguments) throws Exception {
        address = arguments[0];
        topic = arguments[1];
        create();
        produce();
        share();
        seek();
        describe();
        System.out.println("done");
    }

    static void check(Object expected, Object found) {
        if (!Objects.equals(expected, found)) {
            throw new AssertionError("expected " + expected + ", found " + found);
        }
    }

    static Properties settings(String... more) {
        Properties found = new Properties();
        found.put("bootstrap.servers", address);
        for (int at = 0; at < more.length; at += 2) {
            found.put(more[at], more[at + 1]);
        }
        return found;
    }

    static void create() throws Exception {
        try (AdminClient admin = AdminClient.create(settings())) {
            NewTopic wanted = new NewTopic(topic, 1, (short) 1);
            wanted.configs(Collections.singletonMap("retention.ms", "-1"));
            admin.createTopics(List.of(wanted)).all().get();
            admin.createPartitions(Map.of(topic, NewPartitions.increaseTo(2))).all().get();
            check(true, admin.listTopics().names().get().contains(topic));
            check(1, admin.describeCluster().nodes().get().size());
        }
    }

    static void produce() throws Exception {
        List<Future<RecordMetadata>> sent = new ArrayList<>();
        int number = 0;
        for (String codec : CODECS) {
            for (String idempotent : new String[] {"false", "true"}) {
                Properties settings =
                        settings(
                                "compression.type", codec,
                                "enable.idempotence", idempotent,
                                "acks", "all",
                                "linger.ms", "20");
                try (KafkaProducer<byte[], byte[]> producer =
                        new KafkaProducer<>(
                                settings, new ByteArraySerializer(), new ByteArraySerializer())) {
                    for (int at = 0; at < EACH; at++, number++) {
                        byte[] value = (number + " the same words").getBytes(StandardCharsets.UTF_8);
                        sent.add(
                                producer.send(
                                        new ProducerRecord<>(
                                                topic, number % 2, AT_MS + number, null, value)));
                    }
                }
            }
        }
        Set<String> places = new HashSet<>();
        for (Future<RecordMetadata> each : sent) {
            places.add(each.get().partition() + " " + each.get().offset());
        }
        check(TOTAL, places.size());
    }

    static KafkaConsumer<byte[], byte[]> consumer(String group) {
        return new KafkaConsumer<>(
                settings(
                        "group.id", group,
                        "enable.auto.commit", "false",
                        "auto.offset.reset", "earliest",
                        "session.timeout.ms", "10000",
                        "heartbeat.interval.ms", "500",
                        "fetch.max.wait.ms", "100"),
                new ByteArrayDeserializer(),
                new ByteArrayDeserializer());
    }

    /** Two members read everything and commit it; whoever comes later begins there. */
    static void share() {
        Map<String, Integer> found = new HashMap<>();
        Set<TopicPartition> ofOne;
        try (KafkaConsumer<byte[], byte[]> one = consumer(topic);
                KafkaConsumer<byte[], byte[]> other = consumer(topic)) {
            one.subscribe(List.of(topic));
            other.subscribe(List.of(topic));
            long deadline = System.currentTimeMillis() + PATIENCE_MS;
            while (found.size() < TOTAL || one.assignment().size() != 1) {
                check(true, System.currentTimeMillis() < deadline);
                for (KafkaConsumer<byte[], byte[]> each : List.of(one, other)) {
                    for (ConsumerRecord<byte[], byte[]> record : each.poll(Duration.ofMillis(50))) {
                        String value = new String(record.value(), StandardCharsets.UTF_8);
                        found.put(value, record.partition());
                        int number = Integer.parseInt(value.split(" ")[0]);
                        check(AT_MS + number, record.timestamp());
                        check(number % 2, record.partition());
                    }
                }
            }
            ofOne = new HashSet<>(one.assignment());
            for (KafkaConsumer<byte[], byte[]> each : List.of(one, other)) {
                Map<TopicPartition, OffsetAndMetadata> offsets = new HashMap<>();
                for (TopicPartition place : each.assignment()) {
                    offsets.put(place, new OffsetAndMetadata(TOTAL / 2, "here"));
                }
                each.commitSync(offsets);
            }
        }
        check(TOTAL, found.size());
        check(1, ofOne.size());
        try (KafkaConsumer<byte[], byte[]> later = consumer(topic)) {
            later.subscribe(List.of(topic));
            long deadline = System.currentTimeMillis() + PATIENCE_MS;
            while (later.assignment().size() < 2) {
                check(true, System.currentTimeMillis() < deadline);
                later.poll(Duration.ofMillis(50));
            }
            for (TopicPartition place : later.assignment()) {
                check((long) TOTAL / 2, later.position(place));
            }
        }
    }

    static void seek() {
        TopicPartition place = new TopicPartition(topic, 1);
        try (KafkaConsumer<byte[], byte[]> alone = consumer("alone-" + topic)) {
            alone.assign(List.of(place));
            check(0L, alone.beginningOffsets(List.of(place)).get(place));
            check((long) TOTAL / 2, alone.endOffsets(List.of(place)).get(place));
            check(5L, alone.offsetsForTimes(Map.of(place, AT_MS + 11)).get(place).offset());
            check(null, alone.offsetsForTimes(Map.of(place, AT_MS + TOTAL)).get(place));
            alone.seek(place, 5);
            List<Long> offsets = new ArrayList<>();
            long deadline = System.currentTimeMillis() + PATIENCE_MS;
            while (offsets.size() < TOTAL / 2 - 5) {
                check(true, System.currentTimeMillis() < deadline);
                alone.poll(Duration.ofMillis(50)).forEach(each -> offsets.add(each.offset()));
            }
            check(5L, offsets.get(0));
            check((long) TOTAL / 2 - 1, offsets.get(offsets.size() - 1));
        }
    }

    static void describe() throws Exception {
        try (AdminClient admin = AdminClient.create(settings())) {
            ConfigResource resource = new ConfigResource(ConfigResource.Type.TOPIC, topic);
            check(
                    "-1",
                    admin.describeConfigs(List.of(resource))
                            .all()
                            .get()
                            .get(resource)
                            .get("retention.ms")
                            .value());
            check(
                    2,
                    admin.listConsumerGroupOffsets(topic)
                            .partitionsToOffsetAndMetadata()
                            .get()
                            .size());
            check(
                    "Empty",
                    admin.describeConsumerGroups(List.of(topic))
                            .all()
                            .get()
                            .get(topic)
                            .state()
                            .toString());
            admin.deleteConsumerGroups(List.of(topic)).all().get();
            admin.deleteTopics(List.of(topic)).all().get();
        }
    }
}
