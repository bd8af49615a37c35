/*
 * A program of Kafka Streams: how often each word comes, altogether and per minute of its lines.
 *
 * Arguments: address, application, folder of the state, and more settings as name=value. Reads the
 * topic "lines", writes the topics "counts" and "minutes" (keys: word, word@start of the minute).
 * Says "running", "restored <store> <partition> <records>", and "closed" once its standard input
 * has ended; "failed: ..." and exit 1 if Streams gives up.
 */

import java.io.IOException;
import java.io.OutputStream;
import java.time.Duration;
import java.util.Arrays;
import java.util.List;
import java.util.Properties;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.atomic.AtomicBoolean;
import org.apache.kafka.clients.consumer.ConsumerConfig;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.KeyValue;
import org.apache.kafka.streams.StreamsBuilder;
import org.apache.kafka.streams.StreamsConfig;
import org.apache.kafka.streams.errors.StreamsUncaughtExceptionHandler.StreamThreadExceptionResponse;
import org.apache.kafka.streams.kstream.Grouped;
import org.apache.kafka.streams.kstream.KGroupedStream;
import org.apache.kafka.streams.kstream.Materialized;
import org.apache.kafka.streams.kstream.TimeWindows;
import org.apache.kafka.streams.processor.StateRestoreListener;

public class WordCount {
    static final Duration MINUTE = Duration.ofMinutes(1);
    static final Duration PATIENCE = Duration.ofSeconds(60);

    public static void main(String[] arguments) throws Exception {
        KafkaStreams streams = new KafkaStreams(topology().build(), settings(arguments));
        CountDownLatch ending = new CountDownLatch(1);
        AtomicBoolean failed = new AtomicBoolean();
        streams.setUncaughtExceptionHandler(error -> {
            say("failed: " + chain(error));
            failed.set(true);
            ending.countDown();
            return StreamThreadExceptionResponse.SHUTDOWN_CLIENT;
        });
        streams.setStateListener((now, before) -> {
            if (now == KafkaStreams.State.RUNNING) {
                say("running");
            }
        });
        streams.setGlobalStateRestoreListener(new Restored());
        streams.start();
        Thread reader = new Thread(() -> {
            try {
                System.in.transferTo(OutputStream.nullOutputStream());
            } catch (IOException error) {
                say("failed: " + error);
            }
            ending.countDown();
        });
        reader.setDaemon(true);
        reader.start();
        ending.await();
        boolean closed = streams.close(PATIENCE);
        say(closed ? "closed" : "failed: not closed in time");
        System.exit(closed && !failed.get() ? 0 : 1);
    }

    static Properties settings(String[] arguments) {
        Properties settings = new Properties();
        settings.put(StreamsConfig.BOOTSTRAP_SERVERS_CONFIG, arguments[0]);
        settings.put(StreamsConfig.APPLICATION_ID_CONFIG, arguments[1]);
        settings.put(StreamsConfig.STATE_DIR_CONFIG, arguments[2]);
        settings.put(StreamsConfig.NUM_STREAM_THREADS_CONFIG, 2);
        settings.put(StreamsConfig.COMMIT_INTERVAL_MS_CONFIG, 200);
        settings.put(StreamsConfig.REPARTITION_PURGE_INTERVAL_MS_CONFIG, 200);
        settings.put(StreamsConfig.DEFAULT_KEY_SERDE_CLASS_CONFIG, Serdes.StringSerde.class);
        settings.put(StreamsConfig.DEFAULT_VALUE_SERDE_CLASS_CONFIG, Serdes.StringSerde.class);
        // Streams leaves no group that it is in: who comes next waits for the session to end.
        settings.put(ConsumerConfig.SESSION_TIMEOUT_MS_CONFIG, 4_000);
        settings.put(ConsumerConfig.HEARTBEAT_INTERVAL_MS_CONFIG, 1_000);
        for (String more : List.of(arguments).subList(3, arguments.length)) {
            String[] pair = more.split("=", 2);
            settings.put(pair[0], pair[1]);
        }
        return settings;
    }

    static StreamsBuilder topology() {
        StreamsBuilder builder = new StreamsBuilder();
        KGroupedStream<String, String> words = builder.<String, String>stream("lines")
                .flatMapValues(line -> Arrays.asList(line.split(" ")))
                .groupBy((key, word) -> word, Grouped.as("words"));
        words.count(Materialized.as("altogether"))
                .toStream()
                .mapValues(count -> Long.toString(count))
                .to("counts");
        words.windowedBy(TimeWindows.ofSizeAndGrace(MINUTE, Duration.ofHours(1)))
                .count(Materialized.as("each-minute"))
                .toStream()
                .map((word, count) -> KeyValue.pair(
                        word.key() + "@" + word.window().start(), Long.toString(count)))
                .to("minutes");
        return builder;
    }

    /** Tells how much of each store came out of its changelog. */
    static class Restored implements StateRestoreListener {
        @Override
        public void onRestoreStart(TopicPartition place, String store, long from, long to) { }

        @Override
        public void onBatchRestored(TopicPartition place, String store, long end, long count) { }

        @Override
        public void onRestoreEnd(TopicPartition place, String store, long count) {
            say("restored " + store + " " + place.partition() + " " + count);
        }
    }

    /** An error and what it came of, in one line. */
    static String chain(Throwable error) {
        StringBuilder text = new StringBuilder();
        for (Throwable each = error; each != null; each = each.getCause()) {
            text.append(text.length() == 0 ? "" : " <- ").append(each);
        }
        return text.toString().replace('\n', ' ');
    }

    static synchronized void say(String line) {
        System.out.println(line);
        System.out.flush();
    }
}
