// Evaluates PromQL expressions over scrapes, with the engine of Prometheus itself.
//
// Standard input is one JSON object: scrapes (each a time in ms, a text in Prometheus's format, and
// labels of the target) and expressions. Standard output is a JSON array with, for each expression,
// the number of series that it has at the time of the last scrape, or an error.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"time"

	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/textparse"
	"github.com/prometheus/prometheus/promql"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/prometheus/prometheus/storage"
	"github.com/prometheus/prometheus/util/annotations"
)

type scrape struct {
	AtMs   int64             `json:"at_ms"`
	Text   string            `json:"text"`
	Labels map[string]string `json:"labels"`
}

type question struct {
	Scrapes     []scrape `json:"scrapes"`
	Expressions []string `json:"expressions"`
}

type answer struct {
	Series int    `json:"series"`
	Error  string `json:"error,omitempty"`
}

func main() {
	var asked question
	check(json.NewDecoder(os.Stdin).Decode(&asked))
	found := memory{}
	for _, each := range asked.Scrapes {
		check(found.add(each))
	}
	engine := promql.NewEngine(promql.EngineOpts{
		MaxSamples: 50_000_000,
		Timeout:    time.Minute,
		Parser:     parser.NewParser(parser.Options{}),
	})
	at := time.UnixMilli(asked.Scrapes[len(asked.Scrapes)-1].AtMs)
	answers := []answer{}
	for _, expression := range asked.Expressions {
		answers = append(answers, evaluate(engine, found, expression, at))
	}
	check(json.NewEncoder(os.Stdout).Encode(answers))
}

// memory holds the series of all scrapes, by their labels.
type memory map[string]*promql.Series

func (m memory) add(from scrape) error {
	found, err := textparse.New([]byte(from.Text), "text/plain", labels.NewSymbolTable(), textparse.ParserOptions{})
	if err != nil {
		return err
	}
	for {
		entry, err := found.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if entry != textparse.EntrySeries {
			continue
		}
		_, _, value := found.Series()
		var scraped labels.Labels
		found.Labels(&scraped)
		builder := labels.NewBuilder(scraped)
		for name, value := range from.Labels {
			builder.Set(name, value)
		}
		all := builder.Labels()
		series := m[all.String()]
		if series == nil {
			series = &promql.Series{Metric: all}
			m[all.String()] = series
		}
		last := len(series.Floats) - 1
		if last >= 0 && series.Floats[last].T >= from.AtMs {
			return fmt.Errorf("%s is there twice", all)
		}
		series.Floats = append(series.Floats, promql.FPoint{T: from.AtMs, F: value})
	}
}

func (m memory) Querier(_, _ int64) (storage.Querier, error) { return querier{m}, nil }

type querier struct{ all memory }

func (q querier) Select(_ context.Context, _ bool, _ *storage.SelectHints, matchers ...*labels.Matcher) storage.SeriesSet {
	var found []storage.Series
	for _, name := range slices.Sorted(maps.Keys(q.all)) {
		series := q.all[name]
		if !slices.ContainsFunc(matchers, func(m *labels.Matcher) bool { return !m.Matches(series.Metric.Get(m.Name)) }) {
			found = append(found, promql.NewStorageSeries(*series))
		}
	}
	return &seriesSet{left: found}
}

func (querier) LabelValues(context.Context, string, *storage.LabelHints, ...*labels.Matcher) ([]string, annotations.Annotations, error) {
	return nil, nil, nil
}

func (querier) LabelNames(context.Context, *storage.LabelHints, ...*labels.Matcher) ([]string, annotations.Annotations, error) {
	return nil, nil, nil
}

func (querier) Close() error { return nil }

type seriesSet struct {
	left    []storage.Series
	current storage.Series
}

func (s *seriesSet) Next() bool {
	if len(s.left) == 0 {
		return false
	}
	s.current, s.left = s.left[0], s.left[1:]
	return true
}

func (s *seriesSet) At() storage.Series { return s.current }

func (*seriesSet) Err() error { return nil }

func (*seriesSet) Warnings() annotations.Annotations { return nil }

func evaluate(engine *promql.Engine, db storage.Queryable, expression string, at time.Time) answer {
	query, err := engine.NewInstantQuery(context.Background(), db, nil, expression, at)
	if err != nil {
		return answer{Error: err.Error()}
	}
	defer query.Close()
	result := query.Exec(context.Background())
	if result.Err != nil {
		return answer{Error: result.Err.Error()}
	}
	switch value := result.Value.(type) {
	case promql.Vector:
		return answer{Series: len(value)}
	case promql.Matrix:
		return answer{Series: len(value)}
	default:
		return answer{Series: 1}
	}
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
