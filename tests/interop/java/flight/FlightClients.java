/*
 * Arrow Flight's client for Java, over gRPC's of Java and Netty, at work on a broker.
 *
 * Arguments: host and port; for a broker that asks for a login over TLS also the file of its CA, a
 * user and the password. It ends with a line "done"; what is not as it should be ends it with an
 * exception.
 */

import java.io.FileInputStream;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.concurrent.TimeUnit;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import org.apache.arrow.flight.Action;
import org.apache.arrow.flight.CallHeaders;
import org.apache.arrow.flight.CallInfo;
import org.apache.arrow.flight.CallOption;
import org.apache.arrow.flight.CallOptions;
import org.apache.arrow.flight.CallStatus;
import org.apache.arrow.flight.FlightClient;
import org.apache.arrow.flight.FlightClientMiddleware;
import org.apache.arrow.flight.FlightDescriptor;
import org.apache.arrow.flight.FlightRuntimeException;
import org.apache.arrow.flight.FlightStatusCode;
import org.apache.arrow.flight.FlightStream;
import org.apache.arrow.flight.Location;
import org.apache.arrow.flight.PutResult;
import org.apache.arrow.flight.SyncPutListener;
import org.apache.arrow.flight.Ticket;
import org.apache.arrow.memory.ArrowBuf;
import org.apache.arrow.memory.BufferAllocator;
import org.apache.arrow.memory.RootAllocator;
import org.apache.arrow.vector.BigIntVector;
import org.apache.arrow.vector.VarBinaryVector;
import org.apache.arrow.vector.VectorSchemaRoot;
import org.apache.arrow.vector.types.pojo.ArrowType;
import org.apache.arrow.vector.types.pojo.Field;
import org.apache.arrow.vector.types.pojo.Schema;

public class FlightClients {
    private static final int MEBIBYTE = 1 << 20;
    private static final Schema SCHEMA =
            new Schema(List.of(Field.nullable("value", ArrowType.Binary.INSTANCE)));
    private static final Pattern OFFSET = Pattern.compile("\"base_offset\":(\\d+)");

    private final BufferAllocator allocator;
    private final FlightClient client;

    private FlightClients(BufferAllocator allocator, FlightClient client) {
        this.allocator = allocator;
        this.client = client;
    }

    public static void main(String[] arguments) throws Exception {
        int port = Integer.parseInt(arguments[1]);
        boolean hasLogin = arguments.length > 2;
        var token = new Token();
        try (var allocator = new RootAllocator();
                var ca = hasLogin ? new FileInputStream(arguments[2]) : null) {
            var location = Location.forGrpcInsecure(arguments[0], port);
            var builder = FlightClient.builder(allocator, location).intercept(token);
            if (hasLogin) {
                location = Location.forGrpcTls(arguments[0], port);
                builder.location(location).useTls().trustedCertificates(ca);
            }
            try (var client = builder.build()) {
                var found = new FlightClients(allocator, client);
                if (hasLogin) {
                    found.login(token, arguments[3], arguments[4]);
                }
                found.work();
            }
        }
        System.out.println("done");
    }

    private void work() throws Exception {
        actions();
        records(20, 100);
        records(3, MEBIBYTE);
        records(3, 15 * MEBIBYTE);
        refusals();
        for (int number = 0; number < 20; number++) {
            cancellation();
        }
        deadlines();
        records(20, 70_000);
    }

    /** Has the calls from now on send a token, after those without one and with a wrong password. */
    private void login(Token token, String user, String password) throws Exception {
        var error = refused(() -> act("topics.list", "{}"));
        check(error.status().code() == FlightStatusCode.UNAUTHENTICATED, error.toString());
        error = refused(() -> client.authenticateBasicToken(user, password + "x"));
        check(error.status().code() == FlightStatusCode.UNAUTHENTICATED, error.toString());
        client.authenticateBasicToken(user, password).orElseThrow();
        check(token.value != null, "no token");
    }

    /** Keeps the token of a login, and sends it with each call. */
    private static final class Token implements FlightClientMiddleware.Factory {
        private volatile String value;

        @Override
        public FlightClientMiddleware onCallStarted(CallInfo info) {
            return new FlightClientMiddleware() {
                @Override
                public void onBeforeSendingHeaders(CallHeaders outgoing) {
                    if (value != null) {
                        outgoing.insert("authorization", value);
                    }
                }

                @Override
                public void onHeadersReceived(CallHeaders incoming) {
                    if (incoming.containsKey("authorization")) {
                        value = incoming.get("authorization");
                    }
                }

                @Override
                public void onCallCompleted(CallStatus status) {}
            };
        }
    }

    private void actions() {
        var known = new ArrayList<String>();
        client.listActions().forEach(each -> known.add(each.getType()));
        check(known.contains("topics.create"), "actions: " + known);
        act("topics.create", "{\"topic\":\"java\",\"partitions\":1}");
        String info = act("topics.describe", "{\"topic\":\"java\"}");
        check(info.contains("\"topic\":\"java\""), info);
    }

    /** Appends so many batches of two records, one of them of that size, and reads them. */
    private void records(int batches, int size) throws Exception {
        long first = -1;
        try (var root = VectorSchemaRoot.create(SCHEMA, allocator);
                var answers = new SyncPutListener()) {
            var stream = client.startPut(command("{\"topic\":\"java\"}"), root, answers);
            for (int number = 0; number < batches; number++) {
                fill(root, number, size);
                stream.putNext(buffer("{\"partition\":0,\"pipelined\":true}"));
                long base = acked(answers);
                first = number == 0 ? base : first;
                check(base == first + 2 * number, "batch " + number + " has offset " + base);
            }
            stream.completed();
            stream.getResult();
        }
        long end = first + 2 * batches;
        long at = first;
        try (FlightStream stream = get(first, end)) {
            while (stream.next()) {
                var offsets = (BigIntVector) stream.getRoot().getVector("offset");
                var values = (VarBinaryVector) stream.getRoot().getVector("value");
                for (int row = 0; row < stream.getRoot().getRowCount(); row++, at++) {
                    check(offsets.get(row) == at, "offset " + offsets.get(row));
                    int number = (int) ((at - first) / 2);
                    byte[] wanted = (at - first) % 2 == 0 ? new byte[0] : value(number, size);
                    check(Arrays.equals(values.get(row), wanted), "another value at " + at);
                }
            }
        }
        check(at == end, "rows up to " + at + " instead of " + end);
    }

    private void refusals() throws Exception {
        var error = refused(() -> client.getInfo(command("{}")));
        check(error.status().code() == FlightStatusCode.UNIMPLEMENTED, error.toString());
        error = refused(() -> act("topics.describe", "{\"topic\":\"absent\"}"));
        check(error.getMessage().contains("absent"), error.toString());
        error = refused(() -> records(1, 100 * MEBIBYTE));
        check(error.getMessage().contains("max_batch_bytes"), error.toString());
    }

    private void cancellation() throws Exception {
        try (FlightStream stream = get(0, 40)) {
            stream.next();
            stream.cancel("enough", null);
        } catch (FlightRuntimeException error) {
            check(error.status().code() == FlightStatusCode.CANCELLED, error.toString());
        }
        try (var exchange = client.doExchange(tail())) {
            check(exchange.getReader().next(), "a tail without rows");
            exchange.getReader().cancel("enough", null);
        } catch (FlightRuntimeException error) {
            check(error.status().code() == FlightStatusCode.CANCELLED, error.toString());
        }
    }

    private void deadlines() throws Exception {
        CallOption soon = CallOptions.timeout(300, TimeUnit.MILLISECONDS);
        var error = refused(() -> {
            try (var exchange = client.doExchange(tail(), soon)) {
                while (exchange.getReader().next()) {
                    check(true, "");
                }
            }
        });
        check(error.status().code() == FlightStatusCode.TIMED_OUT, error.toString());
        act("topics.list", "{}");
    }

    // -------------------------------------------------------------------------- calls

    private String act(String name, String request) {
        var results = client.doAction(new Action(name, bytes(request)));
        String found = new String(results.next().getBody(), StandardCharsets.UTF_8);
        check(!results.hasNext(), "a second result of " + name);
        return found;
    }

    private FlightStream get(long start, long end) {
        String ticket = "{\"topic\":\"java\",\"partition\":0,\"start\":%d,\"end\":%d}";
        return client.getStream(new Ticket(bytes(String.format(ticket, start, end))));
    }

    private static FlightDescriptor tail() {
        String place = "{\"topic\":\"java\",\"partition\":0,\"offset\":0}";
        return command("{\"positions\":[" + place + "],\"heartbeat_ms\":50}");
    }

    private static void fill(VectorSchemaRoot root, int number, int size) {
        var values = (VarBinaryVector) root.getVector("value");
        root.clear();
        values.allocateNew(size + 16L, 2);
        values.setSafe(0, new byte[0]);
        values.setSafe(1, value(number, size));
        root.setRowCount(2);
    }

    private static long acked(SyncPutListener answers) throws Exception {
        try (PutResult result = answers.read()) {
            check(result != null, "the stream has ended");
            ArrowBuf found = result.getApplicationMetadata();
            byte[] text = new byte[(int) found.readableBytes()];
            found.getBytes(0, text);
            String reply = new String(text, StandardCharsets.UTF_8);
            Matcher offset = OFFSET.matcher(reply);
            check(offset.find() && !reply.contains("error"), reply);
            return Long.parseLong(offset.group(1));
        }
    }

    private static byte[] value(int number, int size) {
        byte[] found = new byte[size];
        Arrays.fill(found, (byte) number);
        return found;
    }

    private ArrowBuf buffer(String text) {
        byte[] found = bytes(text);
        ArrowBuf buffer = allocator.buffer(found.length);
        buffer.writeBytes(found);
        return buffer;
    }

    private static FlightDescriptor command(String text) {
        return FlightDescriptor.command(bytes(text));
    }

    private static byte[] bytes(String text) {
        return text.getBytes(StandardCharsets.UTF_8);
    }

    private interface Work {
        void run() throws Exception;
    }

    private static FlightRuntimeException refused(Work work) throws Exception {
        try {
            work.run();
        } catch (FlightRuntimeException error) {
            return error;
        } catch (java.util.concurrent.ExecutionException error) {
            if (error.getCause() instanceof FlightRuntimeException cause) {
                return cause;
            }
            throw error;
        }
        throw new AssertionError("it was not refused");
    }

    private static void check(boolean holds, String what) {
        if (!holds) {
            throw new AssertionError(what);
        }
    }
}
