// Command interop is franz-go at work on a broker: administration, every codec, a group.
//
// Arguments: the broker's address; for a listener that asks for a login over TLS also the file of its
// CA, a user and the password. It ends with a line "done"; what is not as it should be ends it with an
// error.
package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/sasl/scram"
)

const (
	topic      = "go"
	partitions = 3
	each       = 60
)

var codecs = []kgo.CompressionCodec{
	kgo.NoCompression(), kgo.GzipCompression(), kgo.SnappyCompression(),
	kgo.Lz4Compression(), kgo.ZstdCompression(),
}

// login has the options of a client that logs in over TLS.
var login []kgo.Opt

func main() {
	if len(os.Args) > 2 {
		if err := prepareLogin(os.Args[2], os.Args[3], os.Args[4]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	patience, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	if err := run(patience, os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println("done")
}

func prepareLogin(ca, user, password string) error {
	found, err := os.ReadFile(ca)
	if err != nil {
		return err
	}
	trusted := x509.NewCertPool()
	trusted.AppendCertsFromPEM(found)
	login = []kgo.Opt{
		kgo.DialTLSConfig(&tls.Config{RootCAs: trusted}),
		kgo.SASL(scram.Auth{User: user, Pass: password}.AsSha512Mechanism()),
	}
	return nil
}

// connect returns a client with these options, which logs in if it has to.
func connect(address string, options ...kgo.Opt) (*kgo.Client, error) {
	return kgo.NewClient(append(append(options, login...), kgo.SeedBrokers(address))...)
}

func run(ctx context.Context, address string) error {
	client, err := connect(address)
	if err != nil {
		return err
	}
	defer client.Close()
	admin := kadm.NewClient(client)
	retention := "3600000"
	config := map[string]*string{"retention.ms": &retention}
	if _, err := admin.CreateTopic(ctx, partitions, 1, config, topic); err != nil {
		return fmt.Errorf("create: %w", err)
	}
	if _, err := admin.CreateTopic(ctx, 1, 1, nil, topic); !errors.Is(err, kerr.TopicAlreadyExists) {
		return fmt.Errorf("created twice: %v", err)
	}
	for number, codec := range codecs {
		if err := produce(ctx, address, number, codec); err != nil {
			return fmt.Errorf("produce with codec %d: %w", number, err)
		}
	}
	if err := consume(ctx, address, "eager", kgo.RangeBalancer()); err != nil {
		return fmt.Errorf("an eager group: %w", err)
	}
	if err := consume(ctx, address, "cooperative", kgo.CooperativeStickyBalancer()); err != nil {
		return fmt.Errorf("a cooperative group: %w", err)
	}
	return administer(ctx, admin)
}

func key(number int) []byte {
	if number%3 == 0 {
		return nil
	}
	return fmt.Appendf(nil, "k%d", number)
}

func value(number int) []byte {
	if number%5 == 0 {
		return nil
	}
	return fmt.Appendf(nil, "v%d", number)
}

// produce sends, idempotently, the records of one codec, each to the partition of its number.
func produce(ctx context.Context, address string, turn int, codec kgo.CompressionCodec) error {
	client, err := connect(address,
		kgo.ProducerBatchCompression(codec),
		kgo.RecordPartitioner(kgo.ManualPartitioner()),
	)
	if err != nil {
		return err
	}
	defer client.Close()
	var records []*kgo.Record
	for number := turn * each; number < (turn+1)*each; number++ {
		records = append(records, &kgo.Record{
			Topic:     topic,
			Partition: int32(number % partitions),
			Key:       key(number),
			Value:     value(number),
			Headers:   []kgo.RecordHeader{{Key: "h", Value: fmt.Appendf(nil, "%d", number)}},
		})
	}
	results := client.ProduceSync(ctx, records...)
	if err := results.FirstErr(); err != nil {
		return err
	}
	for _, result := range results {
		if result.Record.Offset < 0 {
			return fmt.Errorf("a record without an offset")
		}
	}
	return nil
}

// consume reads everything as one member, commits, and finds nothing more as the next.
func consume(ctx context.Context, address, group string, balancer kgo.GroupBalancer) error {
	seen := map[string]bool{}
	count := len(codecs) * each
	client, err := member(address, group, balancer)
	if err != nil {
		return err
	}
	for len(seen) < count {
		fetches := client.PollFetches(ctx)
		if err := fetches.Err(); err != nil {
			client.Close()
			return err
		}
		fetches.EachRecord(func(record *kgo.Record) {
			if err = check(record); err != nil {
				return
			}
			seen[fmt.Sprintf("%d-%d", record.Partition, record.Offset)] = true
		})
		if err != nil {
			client.Close()
			return err
		}
	}
	err = client.CommitUncommittedOffsets(ctx)
	client.Close()
	if err != nil {
		return err
	}
	next, err := member(address, group, balancer)
	if err != nil {
		return err
	}
	defer next.Close()
	soon, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	if left := next.PollFetches(soon).NumRecords(); left > 0 {
		return fmt.Errorf("%d records are read again", left)
	}
	return nil
}

func member(address, group string, balancer kgo.GroupBalancer) (*kgo.Client, error) {
	return connect(address,
		kgo.ConsumerGroup(group),
		kgo.ConsumeTopics(topic),
		kgo.Balancers(balancer),
		kgo.DisableAutoCommit(),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
	)
}

// check: what number a record has says all of it.
func check(record *kgo.Record) error {
	number := int(record.Offset)*partitions + int(record.Partition)
	same := string(record.Key) == string(key(number)) && (record.Key == nil) == (key(number) == nil) &&
		string(record.Value) == string(value(number)) && (record.Value == nil) == (value(number) == nil) &&
		len(record.Headers) == 1 && string(record.Headers[0].Value) == fmt.Sprint(number)
	if !same {
		return fmt.Errorf("record %d is another one: %+v", number, record)
	}
	return nil
}

func administer(ctx context.Context, admin *kadm.Client) error {
	ends, err := admin.ListEndOffsets(ctx, topic)
	if err != nil {
		return fmt.Errorf("ends: %w", err)
	}
	if end, _ := ends.Lookup(topic, 1); end.Offset != int64(len(codecs)*each/partitions) {
		return fmt.Errorf("the end is %d", end.Offset)
	}
	lags, err := admin.Lag(ctx, "eager", "cooperative")
	if err != nil {
		return fmt.Errorf("lags: %w", err)
	}
	for group, lag := range lags {
		if lag.Error() != nil || lag.Lag.Total() != 0 {
			return fmt.Errorf("the lag of %s: %d, %v", group, lag.Lag.Total(), lag.Error())
		}
	}
	var until kadm.Offsets
	until.AddOffset(topic, 0, 10, -1)
	deleted, err := admin.DeleteRecords(ctx, until)
	if err != nil {
		return fmt.Errorf("delete records: %w", err)
	}
	if found, _ := deleted.Lookup(topic, 0); found.LowWatermark != 10 {
		return fmt.Errorf("the log starts at %d: %v", found.LowWatermark, found.Err)
	}
	configs, err := admin.DescribeTopicConfigs(ctx, topic)
	if err != nil {
		return fmt.Errorf("configs: %w", err)
	}
	found, err := configs.On(topic, nil)
	if err != nil {
		return fmt.Errorf("configs: %w", err)
	}
	for _, config := range found.Configs {
		if config.Key == "retention.ms" && config.MaybeValue() != "3600000" {
			return fmt.Errorf("retention.ms is %s", config.MaybeValue())
		}
	}
	if _, err := admin.UpdatePartitions(ctx, partitions+1, topic); err != nil {
		return fmt.Errorf("partitions: %w", err)
	}
	groups, err := admin.DeleteGroups(ctx, "eager", "cooperative")
	if err != nil || groups.Error() != nil {
		return fmt.Errorf("delete groups: %v %v", err, groups.Error())
	}
	topics, err := admin.DeleteTopics(ctx, topic)
	if err != nil || topics.Error() != nil {
		return fmt.Errorf("delete topics: %v %v", err, topics.Error())
	}
	return nil
}
