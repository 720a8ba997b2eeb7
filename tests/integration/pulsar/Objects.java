import java.nio.charset.StandardCharsets;
import java.util.Base64;
import java.util.List;
import java.util.Map;
import java.util.concurrent.TimeUnit;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.Message;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.PulsarClient;
import org.apache.pulsar.client.api.PulsarClientException;
import org.apache.pulsar.client.api.Schema;
import org.apache.pulsar.client.api.SchemaSerializationException;
import org.apache.pulsar.client.api.SubscriptionInitialPosition;
import org.apache.pulsar.client.api.schema.Field;
import org.apache.pulsar.client.api.schema.GenericRecord;

/**
 * Typed rows of Spark as objects of Pulsar's Java client, said line by line: `name: value`.
 * Arguments: the broker's URL, a topic with two rows.
 */
public class Objects {
    static final int TIMEOUT_S = 60;

    public static class Place {
        public String city;
    }

    public static class Reading {
        public Long id;
        public String price;
        public byte[] data;
        public Place place;
        public List<String> names;
        public Map<String, Long> counts;
    }

    public static class Wrong {
        public Integer id;
    }

    public static void main(String[] arguments) throws Exception {
        String topic = arguments[1];
        try (PulsarClient client = PulsarClient.builder().serviceUrl(arguments[0]).build()) {
            try (Consumer<Reading> consumer = subscribe(client, Schema.JSON(Reading.class), topic, "pojo")) {
                Message<Reading> first = take(consumer);
                Reading whole = first.getValue();
                say("row", List.of(whole.id, whole.price, text(whole.data), whole.place.city, whole.names, whole.counts));
                Reading empty = take(consumer).getValue();
                say("nulls", empty.price == null && empty.data == null && empty.place == null && empty.names == null);
                say("version", Base64.getEncoder().encodeToString(first.getSchemaVersion()));
            }
            try (Consumer<GenericRecord> consumer = subscribe(client, Schema.AUTO_CONSUME(), topic, "generic")) {
                GenericRecord whole = take(consumer).getValue();
                say("fields", whole.getFields().stream().map(Field::getName).toList());
                say("generic", whole.getField("id") + " " + ((GenericRecord) whole.getField("place")).getField("city"));
            }
            try (Producer<byte[]> producer = client.newProducer(Schema.AUTO_PRODUCE_BYTES()).topic(topic).create()) {
                producer.send("{\"id\":3,\"price\":\"7.00\"}".getBytes(StandardCharsets.UTF_8));
                try {
                    producer.send("no object".getBytes(StandardCharsets.UTF_8));
                    say("bytes that are no object", "taken");
                } catch (SchemaSerializationException refused) {
                    say("bytes that are no object", "refused");
                }
            }
            try (Consumer<Reading> consumer = subscribe(client, Schema.JSON(Reading.class), topic, "pojo")) {
                Message<Reading> third = take(consumer);
                say("by AUTO_PRODUCE", third.getValue().id + " " + third.getValue().price);
                say("its version", Base64.getEncoder().encodeToString(third.getSchemaVersion()));
            }
            try {
                subscribe(client, Schema.JSON(Wrong.class), topic, "wrong");
                say("a wrong type", "taken");
            } catch (PulsarClientException.IncompatibleSchemaException refused) {
                say("a wrong type", "refused");
            }
        }
        System.exit(0); // its threads may linger
    }

    static String text(byte[] data) {
        return new String(data, StandardCharsets.UTF_8);
    }

    static <T> Consumer<T> subscribe(PulsarClient client, Schema<T> schema, String topic, String name) throws Exception {
        return client.newConsumer(schema).topic(topic).subscriptionName(name)
                .subscriptionInitialPosition(SubscriptionInitialPosition.Earliest).subscribe();
    }

    static <T> Message<T> take(Consumer<T> consumer) throws Exception {
        Message<T> message = consumer.receive(TIMEOUT_S, TimeUnit.SECONDS);
        consumer.acknowledge(message);
        return message;
    }

    static void say(String name, Object value) {
        System.out.println(name + ": " + value);
    }
}
