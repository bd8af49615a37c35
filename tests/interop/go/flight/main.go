// Command flight is arrow-go's client of Arrow Flight, and gRPC's of Go, at work on a broker.
//
// Arguments: the address of the broker's Flight port; for one that asks for a login over TLS also the
// file of its CA, a user and the password. It ends with a line "done"; what is not as it should be
// ends it with an error.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/flight"
	"github.com/apache/arrow-go/v18/arrow/ipc"
	"github.com/apache/arrow-go/v18/arrow/memory"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/encoding/gzip"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

const (
	topic        = "go"
	mebibyte     = 1 << 20
	largestBytes = 1 << 30
)

var schema = arrow.NewSchema([]arrow.Field{
	{Name: "key", Type: arrow.BinaryTypes.Binary, Nullable: true},
	{Name: "value", Type: arrow.BinaryTypes.Binary, Nullable: true},
}, nil)

type object map[string]any

func main() {
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	endpoint := endpoint{address: os.Args[1]}
	if len(os.Args) > 2 {
		endpoint.ca, endpoint.user, endpoint.password = os.Args[2], os.Args[3], os.Args[4]
	}
	if err := run(ctx, endpoint); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println("done")
}

// An endpoint is a Flight port, and the login there.
type endpoint struct {
	address, ca, user, password string
}

func run(ctx context.Context, endpoint endpoint) error {
	if endpoint.user != "" {
		if err := mistaken(ctx, endpoint); err != nil {
			return err
		}
	}
	for _, step := range []struct {
		name string
		work func(context.Context, flight.Client) error
	}{
		{"actions", actions},
		{"records", records},
		{"large batches", large},
		{"parallel streams", parallel},
		{"small messages", small},
		{"many calls", many},
		{"refusals", refusals},
		{"headers", headers},
		{"cancellation", cancellation},
		{"deadlines", deadlines},
		{"keepalive", idle},
	} {
		// Small windows that do not grow, and those that gRPC finds by its pings.
		for _, window := range []int32{0, 64 << 10} {
			if window != 0 && step.name == "keepalive" {
				continue // which takes long
			}
			began := time.Now()
			client, err := connect(endpoint, window)
			if err != nil {
				return err
			}
			in, err := login(ctx, client, endpoint)
			if err != nil {
				return err
			}
			err = step.work(in, client)
			client.Close()
			if err != nil {
				return fmt.Errorf("%s, window %d: %w", step.name, window, err)
			}
			took := time.Since(began).Round(time.Millisecond)
			fmt.Fprintln(os.Stderr, step.name, "window", window, "took", took)
		}
	}
	return nil
}

// login returns the context for calls of a client that has logged in, if it has to.
func login(ctx context.Context, client flight.Client, endpoint endpoint) (context.Context, error) {
	if endpoint.user == "" {
		return ctx, nil
	}
	return client.AuthenticateBasicToken(ctx, endpoint.user, endpoint.password)
}

// mistaken expects the refusals of a wrong password, and of a call without a token.
func mistaken(ctx context.Context, endpoint endpoint) error {
	client, err := connect(endpoint, 0)
	if err != nil {
		return err
	}
	defer client.Close()
	_, err = client.AuthenticateBasicToken(ctx, endpoint.user, endpoint.password+"x")
	if status.Code(err) != codes.Unauthenticated {
		return fmt.Errorf("a wrong password: %v", err)
	}
	err = act(ctx, client, "topics.list", object{}, nil)
	if status.Code(err) != codes.Unauthenticated {
		return fmt.Errorf("no token: %v", err)
	}
	return nil
}

func connect(endpoint endpoint, window int32) (flight.Client, error) {
	transport := insecure.NewCredentials()
	if endpoint.ca != "" {
		var err error
		if transport, err = credentials.NewClientTLSFromFile(endpoint.ca, ""); err != nil {
			return nil, err
		}
	}
	options := []grpc.DialOption{
		grpc.WithTransportCredentials(transport),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{
			Time: 10 * time.Second, Timeout: 5 * time.Second, PermitWithoutStream: true,
		}),
		grpc.WithDefaultCallOptions(
			grpc.MaxCallRecvMsgSize(largestBytes), grpc.MaxCallSendMsgSize(largestBytes),
		),
	}
	if window != 0 {
		options = append(options,
			grpc.WithStaticStreamWindowSize(window), grpc.WithStaticConnWindowSize(window))
	}
	return flight.NewClientWithMiddleware(endpoint.address, nil, nil, options...)
}

// ------------------------------------------------------------------------------ calls

func act(ctx context.Context, client flight.Client, name string, ask, reply any) error {
	body, err := json.Marshal(ask)
	if err != nil {
		return err
	}
	stream, err := client.DoAction(ctx, &flight.Action{Type: name, Body: body})
	if err != nil {
		return err
	}
	result, err := stream.Recv()
	if err != nil {
		return err
	}
	if reply != nil {
		if err := json.Unmarshal(result.Body, reply); err != nil {
			return err
		}
	}
	if _, err := stream.Recv(); !errors.Is(err, io.EOF) {
		return fmt.Errorf("a second result of %s: %v", name, err)
	}
	return nil
}

func batch(values ...[]byte) arrow.RecordBatch {
	builder := array.NewRecordBuilder(memory.DefaultAllocator, schema)
	defer builder.Release()
	for number, value := range values {
		builder.Field(0).(*array.BinaryBuilder).Append([]byte{byte(number)})
		builder.Field(1).(*array.BinaryBuilder).Append(value)
	}
	return builder.NewRecordBatch()
}

func command(ask any) *flight.FlightDescriptor {
	body, err := json.Marshal(ask)
	if err != nil {
		panic(err)
	}
	return &flight.FlightDescriptor{Type: flight.DescriptorCMD, Cmd: body}
}

type producer struct {
	stream flight.FlightService_DoPutClient
	writer *flight.Writer
}

func produce(
	ctx context.Context, client flight.Client, options ...ipc.Option,
) (*producer, error) {
	stream, err := client.DoPut(ctx)
	if err != nil {
		return nil, err
	}
	writer := flight.NewRecordWriter(stream, append(options, ipc.WithSchema(schema))...)
	writer.SetFlightDescriptor(command(object{"topic": topic}))
	return &producer{stream, writer}, nil
}

func (p *producer) send(found arrow.RecordBatch, pipelined bool) error {
	beside, err := json.Marshal(object{"partition": 0, "pipelined": pipelined})
	if err != nil {
		return err
	}
	return p.writer.WriteWithAppMetadata(found, beside)
}

// The offset that the next batch was given.
func (p *producer) acked() (int64, error) {
	result, err := p.stream.Recv()
	if err != nil {
		return -1, err
	}
	var reply struct {
		BaseOffset int64 `json:"base_offset"`
		Error      any   `json:"error"`
	}
	if err := json.Unmarshal(result.AppMetadata, &reply); err != nil {
		return -1, err
	}
	if reply.Error != nil {
		return -1, fmt.Errorf("refused: %v", reply.Error)
	}
	return reply.BaseOffset, nil
}

func (p *producer) close() error {
	if err := p.writer.Close(); err != nil {
		return err
	}
	if err := p.stream.CloseSend(); err != nil {
		return err
	}
	if _, err := p.stream.Recv(); !errors.Is(err, io.EOF) {
		return fmt.Errorf("the stream ends with: %v", err)
	}
	return nil
}

// Appends one batch in a stream of its own.
func put(ctx context.Context, client flight.Client, values ...[]byte) (int64, error) {
	producer, err := produce(ctx, client)
	if err != nil {
		return -1, err
	}
	if err := producer.send(batch(values...), false); err != nil {
		return -1, err
	}
	first, err := producer.acked()
	if err != nil {
		return -1, err
	}
	return first, producer.close()
}

func reader(
	ctx context.Context, client flight.Client, start, end int64,
) (*flight.Reader, error) {
	ticket, err := json.Marshal(object{"topic": topic, "partition": 0, "start": start, "end": end})
	if err != nil {
		return nil, err
	}
	stream, err := client.DoGet(ctx, &flight.Ticket{Ticket: ticket})
	if err != nil {
		return nil, err
	}
	return flight.NewRecordReader(stream)
}

// Reads a range, which has to have exactly these values.
func check(ctx context.Context, client flight.Client, start int64, values ...[]byte) error {
	found, err := reader(ctx, client, start, start+int64(len(values)))
	if err != nil {
		return err
	}
	defer found.Release()
	at := 0
	for found.Next() {
		rows := found.RecordBatch()
		offsets := rows.Column(rows.Schema().FieldIndices("offset")[0]).(*array.Int64)
		payload := rows.Column(rows.Schema().FieldIndices("value")[0]).(*array.Binary)
		for row := range int(rows.NumRows()) {
			if offsets.Value(row) != start+int64(at) {
				return fmt.Errorf("offset %d instead of %d", offsets.Value(row), start+int64(at))
			}
			if !bytes.Equal(payload.Value(row), values[at]) {
				return fmt.Errorf("another value at offset %d", offsets.Value(row))
			}
			at++
		}
	}
	if found.Err() != nil {
		return found.Err()
	}
	if at != len(values) {
		return fmt.Errorf("%d rows instead of %d", at, len(values))
	}
	return nil
}

func tail(
	ctx context.Context, client flight.Client, heartbeat time.Duration, more ...object,
) (flight.FlightService_DoExchangeClient, error) {
	stream, err := client.DoExchange(ctx)
	if err != nil {
		return nil, err
	}
	place := object{"topic": topic, "partition": 0, "offset": 0}
	ask := object{"positions": []object{place}, "heartbeat_ms": heartbeat.Milliseconds()}
	for _, each := range more {
		maps.Copy(ask, each)
	}
	return stream, stream.Send(&flight.FlightData{FlightDescriptor: command(ask)})
}

// ------------------------------------------------------------------------------ steps

func actions(ctx context.Context, client flight.Client) error {
	stream, err := client.ListActions(ctx, &flight.Empty{})
	if err != nil {
		return err
	}
	known := map[string]bool{}
	for {
		action, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		known[action.Type] = true
	}
	if !known["topics.create"] || !known["cluster"] {
		return fmt.Errorf("actions: %v", known)
	}
	wanted := object{"topic": topic, "partitions": 1, "if_absent": true}
	if err := act(ctx, client, "topics.create", wanted, nil); err != nil {
		return err
	}
	var info struct {
		Topic      string   `json:"topic"`
		Partitions []object `json:"partitions"`
	}
	if err := act(ctx, client, "topics.describe", object{"topic": topic}, &info); err != nil {
		return err
	}
	if info.Topic != topic || len(info.Partitions) != 1 {
		return fmt.Errorf("described as %v", info)
	}
	return nil
}

func records(ctx context.Context, client flight.Client) error {
	producer, err := produce(ctx, client)
	if err != nil {
		return err
	}
	const batches = 40
	var values [][]byte
	first := int64(-1)
	for number := range batches {
		some := [][]byte{[]byte(fmt.Sprint("a", number)), {}, bytes.Repeat([]byte("b"), number*50)}
		values = append(values, some...)
		if err := producer.send(batch(some...), true); err != nil {
			return err
		}
	}
	for number := range batches {
		base, err := producer.acked()
		if err != nil {
			return err
		}
		if number == 0 {
			first = base
		}
		if base != first+int64(3*number) {
			return fmt.Errorf("batch %d has offset %d, the first %d", number, base, first)
		}
	}
	if err := producer.close(); err != nil {
		return err
	}
	return check(ctx, client, first, values...)
}

func large(ctx context.Context, client flight.Client) error {
	// Around the free window, a step of what is let in, and the largest batch.
	for _, size := range []int{64 << 10, mebibyte, 4*mebibyte + 1, 40 * mebibyte} {
		values := make([][]byte, (size+mebibyte/2)/(mebibyte/2))
		for number := range values {
			values[number] = bytes.Repeat([]byte{byte(number)}, size/len(values))
		}
		first, err := put(ctx, client, values...)
		if err != nil {
			return fmt.Errorf("%d bytes: %w", size, err)
		}
		if err := check(ctx, client, first, values...); err != nil {
			return fmt.Errorf("%d bytes: %w", size, err)
		}
	}
	return nil
}

func parallel(ctx context.Context, client flight.Client) error {
	var group sync.WaitGroup
	failures := make(chan error, 32)
	for number := range 32 {
		group.Add(1)
		go func() {
			defer group.Done()
			value := bytes.Repeat([]byte{byte(number)}, 200_000)
			first, err := put(ctx, client, value, value)
			if err == nil {
				err = check(ctx, client, first, value, value)
			}
			if err != nil {
				failures <- err
			}
		}()
	}
	group.Wait()
	close(failures)
	return <-failures
}

// Thousands of messages, to each of which the client may answer with a ping that measures.
func small(ctx context.Context, client flight.Client) error {
	values := make([][]byte, 20_000)
	for number := range values {
		values[number] = []byte{byte(number)}
	}
	if _, err := put(ctx, client, values...); err != nil {
		return err
	}
	some, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := tail(some, client, time.Second, object{"max_batch_rows": 1})
	if err != nil {
		return err
	}
	for range values {
		if _, err := stream.Recv(); err != nil {
			return err
		}
	}
	return nil
}

// Thousands of calls, each of which ends with a frame without data.
func many(ctx context.Context, client flight.Client) error {
	var group sync.WaitGroup
	failures := make(chan error, 16)
	for range 16 {
		group.Add(1)
		go func() {
			defer group.Done()
			for range 400 {
				if err := act(ctx, client, "topics.list", object{}, nil); err != nil {
					failures <- err
					return
				}
			}
		}()
	}
	group.Wait()
	close(failures)
	return <-failures
}

func refusals(ctx context.Context, client flight.Client) error {
	expect := func(what string, err error, code codes.Code, text string) error {
		if status.Code(err) != code || !strings.Contains(fmt.Sprint(err), text) {
			return fmt.Errorf("%s: %v", what, err)
		}
		return nil
	}
	_, err := client.GetFlightInfo(ctx, command(object{}))
	if err := expect("no such method", err, codes.Unimplemented, "method"); err != nil {
		return err
	}
	stream, err := client.DoAction(
		ctx, &flight.Action{Type: "topics.list", Body: []byte("{}")}, grpc.UseCompressor(gzip.Name),
	)
	if err != nil {
		return err
	}
	_, err = stream.Recv()
	if err := expect("compressed by gRPC", err, codes.Unimplemented, "compressed"); err != nil {
		return err
	}
	producer, err := produce(ctx, client, ipc.WithZstd())
	if err != nil {
		return err
	}
	if err := producer.send(batch(make([]byte, 10_000)), false); err != nil {
		return err
	}
	_, err = producer.acked()
	if err := expect("compressed by Arrow", err, codes.Unknown, "compressed"); err != nil {
		return err
	}
	err = act(ctx, client, "topics.describe", object{"topic": "absent"}, nil)
	if err := expect("no such topic", err, codes.Unknown, "absent"); err != nil {
		return err
	}
	_, err = put(ctx, client, make([]byte, 100*mebibyte))
	if err == nil {
		return errors.New("a batch of 100 MiB was taken")
	}
	return records(ctx, client)
}

// Headers that fill the dynamic table of HPACK and drive each other out of it.
func headers(ctx context.Context, client flight.Client) error {
	for number := range 300 {
		more := metadata.AppendToOutgoingContext(ctx,
			"same", strings.Repeat("s", 500),
			fmt.Sprint("name", number%7), strings.Repeat("v", number*5),
			"bytes-bin", string([]byte{0, byte(number), 255}),
		)
		if err := act(more, client, "topics.describe", object{"topic": topic}, nil); err != nil {
			return fmt.Errorf("call %d: %w", number, err)
		}
	}
	more := metadata.AppendToOutgoingContext(ctx, "large", strings.Repeat("x", 30_000))
	if err := act(more, client, "topics.list", object{}, nil); err == nil {
		return errors.New("headers of 30,000 bytes were taken")
	}
	return act(ctx, client, "topics.list", object{}, nil)
}

func cancellation(ctx context.Context, client flight.Client) error {
	for range 30 {
		// In the middle of an answer, of a tail, of a stream, and of a large message.
		some, cancel := context.WithCancel(ctx)
		found, err := reader(some, client, 0, 100)
		if err != nil {
			return err
		}
		found.Next()
		cancel()
		found.Release()

		some, cancel = context.WithCancel(ctx)
		stream, err := tail(some, client, 20*time.Millisecond)
		if err != nil {
			return err
		}
		if _, err := stream.Recv(); err != nil {
			return err
		}
		cancel()
		for err == nil {
			_, err = stream.Recv()
		}
		if status.Code(err) != codes.Canceled {
			return err
		}

		some, cancel = context.WithCancel(ctx)
		producer, err := produce(some, client)
		if err != nil {
			return err
		}
		go func() {
			time.Sleep(time.Millisecond)
			cancel()
		}()
		_ = producer.send(batch(make([]byte, 4*mebibyte)), false)
		_, _ = producer.acked()
	}
	return records(ctx, client)
}

func deadlines(ctx context.Context, client flight.Client) error {
	some, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
	defer cancel()
	stream, err := tail(some, client, 50*time.Millisecond)
	for err == nil {
		_, err = stream.Recv()
	}
	if status.Code(err) != codes.DeadlineExceeded {
		return err
	}
	return act(ctx, client, "topics.list", object{}, nil)
}

// Says nothing for longer than two pings of the client take.
func idle(ctx context.Context, client flight.Client) error {
	stream, err := tail(ctx, client, time.Minute)
	if err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() {
		for {
			if _, err := stream.Recv(); err != nil {
				ended <- err
				return
			}
		}
	}()
	select {
	case err := <-ended:
		return err
	case <-time.After(23 * time.Second):
	}
	_, err = put(ctx, client, []byte("after"))
	return err
}
