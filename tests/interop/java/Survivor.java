/*
 * Kafka's Java clients at work while brokers are killed.
 *
 * Arguments: address, topic, partitions, number of the producer, the longest pause between bursts in
 * milliseconds, seed. A producer writes values "number:count" to random partitions until a line
 * comes on standard input; a member of the group "java" reads and commits; a consumer without a
 * group reads each partition from its start. Each step is a line of the output:
 *
 *   sent PARTITION VALUE; acked PARTITION OFFSET VALUE; ended; failed REASON
 *   got PARTITION OFFSET VALUE; committed PARTITION OFFSET (of the member)
 *   read PARTITION OFFSET VALUE (of the other consumer)
 */

import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.Random;
import org.apache.kafka.clients.consumer.CommitFailedException;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.errors.RebalanceInProgressException;
import org.apache.kafka.common.errors.TimeoutException;
import org.apache.kafka.common.serialization.StringDeserializer;
import org.apache.kafka.common.serialization.StringSerializer;

public class Survivor {
    static final Duration SOON = Duration.ofMillis(100);
    static final int[] BURSTS = {1, 1, 3, 50};

    static String address;
    static String topic;
    static int partitions;
    static volatile boolean isOver = false;

    interface Work {
        void run() throws Exception;
    }

    public static void main(String[] arguments) throws Exception {
        address = arguments[0];
        topic = arguments[1];
        partitions = Integer.parseInt(arguments[2]);
        start(() -> produce(arguments[3], Integer.parseInt(arguments[4]), new Random(Long.parseLong(arguments[5]))));
        start(Survivor::share);
        start(Survivor::read);
        System.in.read();
        isOver = true;
    }

    static void start(Work work) {
        new Thread(() -> {
            try {
                work.run();
            } catch (Throwable error) {
                error.printStackTrace();
                say("failed " + error);
                System.exit(1);
            }
        }).start();
    }

    static void say(String line) {
        synchronized (System.out) {
            System.out.println(line);
            System.out.flush();
        }
    }

    static Properties given() {
        Properties given = new Properties();
        given.put("bootstrap.servers", address);
        given.put("request.timeout.ms", 5_000);
        given.put("reconnect.backoff.ms", 20);
        given.put("reconnect.backoff.max.ms", 200);
        given.put("retry.backoff.ms", 20);
        given.put("retry.backoff.max.ms", 200);
        return given;
    }

    static void produce(String number, int pauseMs, Random chance) throws Exception {
        Properties given = given();
        given.put("delivery.timeout.ms", 600_000);
        given.put("linger.ms", 2);
        try (var producer = new KafkaProducer<>(given, new StringSerializer(), new StringSerializer())) {
            for (long count = 0; !isOver;) {
                for (int left = BURSTS[chance.nextInt(BURSTS.length)]; left > 0; left--, count++) {
                    int partition = chance.nextInt(partitions);
                    String value = number + ":" + count;
                    say("sent " + partition + " " + value);
                    producer.send(new ProducerRecord<>(topic, partition, null, value), (found, error) -> say(
                        error == null ? "acked " + partition + " " + found.offset() + " " + value : "failed " + error));
                }
                if (chance.nextInt(5) == 0) {
                    producer.flush();
                }
                Thread.sleep(chance.nextInt(pauseMs + 1));
            }
        }
        say("ended");
    }

    static KafkaConsumer<String, String> consumer(Map<String, Object> more) {
        Properties given = given();
        given.put("enable.auto.commit", false);
        given.putAll(more);
        return new KafkaConsumer<>(given, new StringDeserializer(), new StringDeserializer());
    }

    static void share() {
        Map<String, Object> more = Map.of(
            "group.id", "java", "auto.offset.reset", "earliest", "session.timeout.ms", 3_000,
            "heartbeat.interval.ms", 300, "default.api.timeout.ms", 20_000,
            "partition.assignment.strategy", "org.apache.kafka.clients.consumer.CooperativeStickyAssignor");
        try (var consumer = consumer(more)) {
            consumer.subscribe(List.of(topic));
            Map<TopicPartition, OffsetAndMetadata> after = new HashMap<>();
            while (true) {
                for (ConsumerRecord<String, String> each : consumer.poll(SOON)) {
                    say("got " + each.partition() + " " + each.offset() + " " + each.value());
                    after.put(new TopicPartition(topic, each.partition()), new OffsetAndMetadata(each.offset() + 1));
                }
                after.keySet().retainAll(consumer.assignment());
                if (!after.isEmpty() && commit(consumer, after)) {
                    after.clear();
                }
            }
        }
    }

    /* Returns whether there was an ack; else the outcome is unknown, and it commits again. */
    static boolean commit(KafkaConsumer<String, String> consumer, Map<TopicPartition, OffsetAndMetadata> after) {
        try {
            consumer.commitSync(after);
            after.forEach((place, found) -> say("committed " + place.partition() + " " + found.offset()));
            return true;
        } catch (CommitFailedException | RebalanceInProgressException | TimeoutException error) {
            return false;
        }
    }

    /* Fails where a broker says that an offset does not exist. */
    static void read() {
        try (var consumer = consumer(Map.of("auto.offset.reset", "none"))) {
            List<TopicPartition> places = new ArrayList<>();
            for (int partition = 0; partition < partitions; partition++) {
                places.add(new TopicPartition(topic, partition));
            }
            consumer.assign(places);
            places.forEach(place -> consumer.seek(place, 0));
            while (true) {
                for (ConsumerRecord<String, String> each : consumer.poll(SOON)) {
                    say("read " + each.partition() + " " + each.offset() + " " + each.value());
                }
            }
        }
    }
}
