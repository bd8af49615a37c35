/*
 * Kafka's Java clients at work on a broker, each way in which a program may want them.
 *
 * Arguments: address, topic. The topic has two partitions and is empty. Ends with a line "done";
 * what is not as it should be is an exception.
 */

import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collection;
import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Objects;
import java.util.Properties;
import java.util.Set;
import java.util.TreeMap;
import java.util.concurrent.Future;
import org.apache.kafka.clients.consumer.CommitFailedException;
import org.apache.kafka.clients.consumer.ConsumerRebalanceListener;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.consumer.OffsetAndTimestamp;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.errors.FencedInstanceIdException;
import org.apache.kafka.common.header.Header;
import org.apache.kafka.common.header.internals.RecordHeader;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;

public class Clients {
    static final String[] CODECS = {"none", "gzip", "snappy", "lz4", "zstd"};
    static final int EACH = 60;
    static final long AT_MS = 1_700_000_000_123L;
    static final Duration SOON = Duration.ofMillis(100);
    static final long PATIENCE_MS = 60_000;

    static String address;
    static String topic;
    static List<TopicPartition> places;

    public static void main(String[] arguments) throws Exception {
        address = arguments[0];
        topic = arguments[1];
        places = List.of(new TopicPartition(topic, 0), new TopicPartition(topic, 1));
        produce();
        readFromEverywhere();
        commit();
        share("org.apache.kafka.clients.consumer.CooperativeStickyAssignor");
        share("org.apache.kafka.clients.consumer.RangeAssignor");
        replaceStaticMember();
        System.out.println("done");
    }

    /* -------------------------------------------------------------------------- records */

    static byte[] key(int number) {
        return number % 3 == 0 ? null : ("k" + number).getBytes(StandardCharsets.UTF_8);
    }

    static byte[] value(int number) {
        return number % 5 == 0 ? null : ("v" + number).getBytes(StandardCharsets.UTF_8);
    }

    static List<Header> headers(int number) {
        if (number % 2 == 0) {
            return List.of();
        }
        byte[] some = Integer.toString(number).getBytes(StandardCharsets.UTF_8);
        return List.of(new RecordHeader("h", some), new RecordHeader("h", null), new RecordHeader("", new byte[0]));
    }

    static void produce() throws Exception {
        int number = 0;
        for (String codec : CODECS) {
            Properties given = new Properties();
            given.put("bootstrap.servers", address);
            given.put("compression.type", codec);
            given.put("linger.ms", 50);
            given.put("enable.idempotence", !codec.equals("gzip"));
            List<Future<RecordMetadata>> sent = new ArrayList<>();
            try (var producer = new KafkaProducer<>(given, new ByteArraySerializer(), new ByteArraySerializer())) {
                for (int each = 0; each < EACH; each++, number++) {
                    sent.add(producer.send(new ProducerRecord<>(
                        topic, number % 2, AT_MS + number, key(number), value(number), headers(number))));
                }
                producer.flush();
            }
            for (int each = 0; each < EACH; each++) {
                int which = number - EACH + each;
                RecordMetadata found = sent.get(each).get();
                equal(which % 2, found.partition(), "partition of " + which);
                equal((long) (which / 2), found.offset(), "offset of " + which);
                equal(AT_MS + which, found.timestamp(), "time of " + which);
            }
        }
    }

    static void check(ConsumerRecord<byte[], byte[]> record) {
        int number = (int) (2 * record.offset()) + record.partition();
        require(Arrays.equals(key(number), record.key()), "key of " + number);
        require(Arrays.equals(value(number), record.value()), "value of " + number);
        equal(AT_MS + number, record.timestamp(), "time of " + number);
        equal(headers(number), List.of(record.headers().toArray()), "headers of " + number);
    }

    /* -------------------------------------------------------------------------- one consumer */

    static KafkaConsumer<byte[], byte[]> consumer(Map<String, Object> more) {
        Properties given = new Properties();
        given.put("bootstrap.servers", address);
        given.put("enable.auto.commit", false);
        given.put("auto.offset.reset", "none");
        given.putAll(more);
        return new KafkaConsumer<>(given, new ByteArrayDeserializer(), new ByteArrayDeserializer());
    }

    static void readFromEverywhere() {
        long end = CODECS.length * EACH / 2;
        for (String isolation : List.of("read_uncommitted", "read_committed")) {
            try (var consumer = consumer(Map.of("isolation.level", isolation))) {
                consumer.assign(places);
                equal(Map.of(places.get(0), 0L, places.get(1), 0L), consumer.beginningOffsets(places), "beginning");
                equal(Map.of(places.get(0), end, places.get(1), end), consumer.endOffsets(places), "end");
                consumer.seekToBeginning(places);
                readTo(consumer, 0, end);
                for (long from : new long[] {1, 29, 30, 31, 77, end - 1}) {
                    places.forEach(place -> consumer.seek(place, from));
                    readTo(consumer, from, end);
                }
                consumer.seekToEnd(places);
                equal(0, consumer.poll(SOON).count(), "records at the end");
                places.forEach(place -> equal(end, consumer.position(place), "position at the end"));
                Map<TopicPartition, Long> times = Map.of(places.get(0), AT_MS + 101, places.get(1), AT_MS + 101);
                Map<TopicPartition, OffsetAndTimestamp> found = consumer.offsetsForTimes(times);
                equal(51L, found.get(places.get(0)).offset(), "by time, 0");
                equal(AT_MS + 102, found.get(places.get(0)).timestamp(), "the time there, 0");
                equal(50L, found.get(places.get(1)).offset(), "by time, 1");
                equal(null, consumer.offsetsForTimes(Map.of(places.get(0), AT_MS + 10_000)).get(places.get(0)), "after all");
            }
        }
    }

    static void readTo(KafkaConsumer<byte[], byte[]> consumer, long from, long end) {
        Map<Integer, Long> next = new HashMap<>(Map.of(0, from, 1, from));
        long deadline = System.currentTimeMillis() + PATIENCE_MS;
        while (next.get(0) < end || next.get(1) < end) {
            require(System.currentTimeMillis() < deadline, "waited too long from " + from);
            for (ConsumerRecord<byte[], byte[]> record : consumer.poll(SOON)) {
                equal(next.get(record.partition()), record.offset(), "order");
                next.put(record.partition(), record.offset() + 1);
                check(record);
            }
        }
    }

    static void commit() {
        var first = new OffsetAndMetadata(7, java.util.Optional.empty(), "note");
        try (var consumer = consumer(Map.of("group.id", "simple"))) {
            consumer.assign(places);
            equal(null, consumer.committed(Set.copyOf(places)).get(places.get(0)), "before");
            consumer.commitSync(Map.of(places.get(0), first));
        }
        try (var consumer = consumer(Map.of("group.id", "simple"))) {
            consumer.assign(List.of(places.get(0)));
            equal(first, consumer.committed(Set.copyOf(places)).get(places.get(0)), "committed");
            equal(7L, consumer.position(places.get(0)), "position");
        }
    }

    /* -------------------------------------------------------------------------- several */

    static void share(String assignor) {
        Map<String, Object> options = Map.of(
            "group.id", assignor, "auto.offset.reset", "earliest", "partition.assignment.strategy", assignor,
            "max.poll.records", 10);
        Set<String> seen = new HashSet<>();
        Map<String, Integer> revoked = new TreeMap<>();
        try (var first = consumer(options); var second = consumer(options)) {
            first.subscribe(List.of(topic), listener("first", revoked));
            settle(seen, new int[] {2}, first);
            second.subscribe(List.of(topic), listener("second", revoked));
            settle(seen, new int[] {1, 1}, first, second);
            first.unsubscribe();
            settle(seen, new int[] {2}, second);
            long deadline = System.currentTimeMillis() + PATIENCE_MS;
            while (seen.size() < CODECS.length * EACH) {
                require(System.currentTimeMillis() < deadline, "not all was read: " + seen.size());
                take(seen, second);
            }
        }
        require(revoked.get("first") >= 1, "nothing was taken from the first one");
    }

    static ConsumerRebalanceListener listener(String name, Map<String, Integer> revoked) {
        return new ConsumerRebalanceListener() {
            @Override
            public void onPartitionsRevoked(Collection<TopicPartition> gone) {
                revoked.merge(name, gone.size(), Integer::sum);
            }

            @Override
            public void onPartitionsAssigned(Collection<TopicPartition> come) {}
        };
    }

    @SafeVarargs
    static void settle(Set<String> seen, int[] shares, KafkaConsumer<byte[], byte[]>... members) {
        long deadline = System.currentTimeMillis() + PATIENCE_MS;
        while (true) {
            require(System.currentTimeMillis() < deadline, "the group does not come to rest");
            boolean settled = true;
            for (int each = 0; each < members.length; each++) {
                take(seen, members[each]);
                settled &= members[each].assignment().size() == shares[each];
            }
            if (settled) {
                return;
            }
        }
    }

    static void take(Set<String> seen, KafkaConsumer<byte[], byte[]> member) {
        for (ConsumerRecord<byte[], byte[]> record : member.poll(SOON)) {
            check(record);
            seen.add(record.partition() + "-" + record.offset());
        }
        try {
            member.commitSync();
        } catch (CommitFailedException | org.apache.kafka.common.errors.RebalanceInProgressException error) {
            // Others read that again.
        }
    }

    static void replaceStaticMember() {
        Map<String, Object> options = Map.of(
            "group.id", "static", "group.instance.id", "one", "auto.offset.reset", "earliest", "max.poll.records", 1);
        var old = consumer(options);
        old.subscribe(List.of(topic));
        settle(new HashSet<>(), new int[] {2}, old);
        try (var replacing = consumer(options)) {
            replacing.subscribe(List.of(topic));
            settle(new HashSet<>(), new int[] {2}, replacing);
            try {
                long deadline = System.currentTimeMillis() + PATIENCE_MS;
                while (System.currentTimeMillis() < deadline) {
                    old.poll(SOON);
                    old.commitSync();
                }
                throw new IllegalStateException("the old member goes on");
            } catch (FencedInstanceIdException expected) {
                old.close();
            }
        }
    }

    /* -------------------------------------------------------------------------- checks */

    static void equal(Object expected, Object found, String what) {
        require(Objects.equals(expected, found), what + ": " + found + ", not " + expected);
    }

    static void require(boolean met, String what) {
        if (!met) {
            throw new IllegalStateException(what);
        }
    }
}
