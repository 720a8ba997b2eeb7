import java.util.concurrent.TimeUnit;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.Message;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.PulsarClient;
import org.apache.pulsar.client.api.PulsarClientException;
import org.apache.pulsar.client.api.Schema;
import org.apache.pulsar.client.api.SubscriptionInitialPosition;
import org.apache.pulsar.client.api.schema.GenericRecord;
import org.apache.pulsar.common.schema.KeyValue;
import org.apache.pulsar.common.schema.KeyValueEncodingType;

/**
 * Values of KEY_VALUE schemas that Pulsar's Java client sends and receives, said line by line:
 * `name: value`. Arguments: the broker's URL, and a topic for each encoding: inline, separated.
 */
public class Pairs {
    static final int TIMEOUT_S = 60;

    public static class Reading {
        public String text;
        public Long number;
    }

    public static void main(String[] arguments) throws Exception {
        try (PulsarClient client = PulsarClient.builder().serviceUrl(arguments[0]).build()) {
            say(client, arguments[1], KeyValueEncodingType.INLINE);
            say(client, arguments[2], KeyValueEncodingType.SEPARATED);
        }
        System.exit(0); // its threads may linger
    }

    static void say(PulsarClient client, String topic, KeyValueEncodingType encoding) throws Exception {
        Schema<KeyValue<Integer, Reading>> schema = Schema.KeyValue(Schema.INT32, Schema.AVRO(Reading.class), encoding);
        try (Producer<KeyValue<Integer, Reading>> producer = client.newProducer(schema).topic(topic).create()) {
            for (int number = 1; number < 4; number++) {
                Reading reading = new Reading();
                reading.text = number == 2 ? null : "t" + number;
                reading.number = (long) number;
                producer.send(new KeyValue<>(number * 10, reading));
            }
        }
        Message<KeyValue<Integer, Reading>> typed = first(client, schema, topic);
        KeyValue<Integer, Reading> pair = typed.getValue();
        System.out.println(encoding + ": " + pair.getKey() + " " + pair.getValue().text + " " + typed.hasKey());
        KeyValue<?, ?> generic = (KeyValue<?, ?>) first(client, Schema.AUTO_CONSUME(), topic).getValue().getNativeObject();
        Object text = ((GenericRecord) generic.getValue()).getField("text");
        System.out.println(encoding + " by AUTO_CONSUME: " + generic.getKey() + " " + text);
        try {
            first(client, Schema.KeyValue(Schema.STRING, Schema.AVRO(Reading.class), encoding), topic);
            System.out.println(encoding + " by another key: taken");
        } catch (PulsarClientException.IncompatibleSchemaException refused) {
            System.out.println(encoding + " by another key: refused");
        }
    }

    static <T> Message<T> first(PulsarClient client, Schema<T> schema, String topic) throws Exception {
        try (Consumer<T> consumer = client.newConsumer(schema).topic(topic).subscriptionName("java")
                .subscriptionInitialPosition(SubscriptionInitialPosition.Earliest).subscribe()) {
            return consumer.receive(TIMEOUT_S, TimeUnit.SECONDS);
        }
    }
}
