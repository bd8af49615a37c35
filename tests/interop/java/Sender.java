/*
 * Kafka's Java producer with its default settings, which are those of an idempotent one.
 *
 * Arguments: address. Each line of its standard input is "topic value"; it is sent to partition 0,
 * and answered with a line: the offset, or the error. Ends with its input.
 */

import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.util.Properties;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.serialization.StringSerializer;

public class Sender {
    public static void main(String[] arguments) throws Exception {
        Properties given = new Properties();
        given.put("bootstrap.servers", arguments[0]);
        given.put("delivery.timeout.ms", 30_000);
        given.put("request.timeout.ms", 10_000);
        var lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        try (var producer = new KafkaProducer<>(given, new StringSerializer(), new StringSerializer())) {
            for (String line = lines.readLine(); line != null; line = lines.readLine()) {
                String[] words = line.split(" ", 2);
                try {
                    var sent = producer.send(new ProducerRecord<>(words[0], 0, null, words[1])).get();
                    System.out.println("value " + words[1] + " at " + sent.offset());
                } catch (java.util.concurrent.ExecutionException error) {
                    System.out.println("value " + words[1] + " failed: " + error.getCause());
                }
                System.out.flush();
            }
        }
    }
}
