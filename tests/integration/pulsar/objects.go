// Typed rows of Spark as objects of Pulsar's client for Go, said line by line: `name: value`.
// Arguments: the broker's URL, a topic with two rows.
package main

import (
	"context"
	"encoding/base64"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/apache/pulsar-client-go/pulsar"
	"github.com/apache/pulsar-client-go/pulsar/log"
	"github.com/sirupsen/logrus"
)

const timeout = 60 * time.Second

type Place struct {
	City *string `json:"city"`
}

type Reading struct {
	ID     int64            `json:"id"`
	Price  *string          `json:"price"`
	Data   []byte           `json:"data"`
	Place  *Place           `json:"place"`
	Names  []string         `json:"names"`
	Counts map[string]int64 `json:"counts"`
}

const declared = `{"type": "record", "name": "Reading", "fields": [
	{"name": "id", "type": ["null", "long"], "default": null},
	{"name": "price", "type": ["null", "string"], "default": null},
	{"name": "data", "type": ["null", "bytes"], "default": null},
	{"name": "place", "type": ["null", {"type": "record", "name": "Place", "fields": [
		{"name": "city", "type": ["null", "string"], "default": null}]}], "default": null},
	{"name": "names", "type": ["null", {"type": "array", "items": "string"}], "default": null},
	{"name": "counts", "type": ["null", {"type": "map", "values": "long"}], "default": null}]}`

const wrong = `{"type": "record", "name": "Reading", "fields": [{"name": "id", "type": "boolean"}]}`

func main() {
	quiet := logrus.New()
	quiet.SetOutput(io.Discard)
	client, err := pulsar.NewClient(pulsar.ClientOptions{URL: os.Args[1], Logger: log.NewLoggerWithLogrus(quiet)})
	check(err)
	defer client.Close()
	topic := os.Args[2]

	consumer := subscribe(client, topic, "declared", pulsar.NewJSONSchema(declared, nil))
	whole, message := take(consumer)
	say("row", whole.ID, *whole.Price, string(whole.Data), *whole.Place.City, whole.Names, whole.Counts)
	say("version", base64.StdEncoding.EncodeToString(message.SchemaVersion()))
	empty, _ := take(consumer)
	say("nulls", empty.Price == nil && empty.Data == nil && empty.Place == nil && empty.Names == nil && empty.Counts == nil)

	producer, err := client.CreateProducer(pulsar.ProducerOptions{Topic: topic, Schema: pulsar.NewJSONSchema(declared, nil)})
	check(err)
	price := "7.00"
	_, err = producer.Send(context.Background(), &pulsar.ProducerMessage{Value: &Reading{ID: 3, Price: &price, Data: []byte("go")}})
	check(err)
	third, _ := take(consumer)
	say("of Go", third.ID, *third.Price, string(third.Data))

	_, err = client.Subscribe(pulsar.ConsumerOptions{Topic: topic, SubscriptionName: "wrong", Schema: pulsar.NewJSONSchema(wrong, nil)})
	say("a wrong type", err != nil)

	generic := subscribe(client, topic, "by version", nil)
	reading, _ := take(generic)
	say("by the version's schema", reading.ID, *reading.Place.City)
}

func subscribe(client pulsar.Client, topic string, name string, schema pulsar.Schema) pulsar.Consumer {
	consumer, err := client.Subscribe(pulsar.ConsumerOptions{
		Topic: topic, SubscriptionName: name, Schema: schema,
		SubscriptionInitialPosition: pulsar.SubscriptionPositionEarliest,
	})
	check(err)
	return consumer
}

func take(consumer pulsar.Consumer) (Reading, pulsar.Message) {
	limit, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	message, err := consumer.Receive(limit)
	check(err)
	check(consumer.Ack(message))
	var reading Reading
	check(message.GetSchemaValue(&reading))
	return reading, message
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}

func say(name string, values ...any) {
	fmt.Println(append([]any{name + ":"}, values...)...)
}
