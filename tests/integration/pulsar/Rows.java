import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.TimeUnit;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.Message;
import org.apache.pulsar.client.api.MessageId;
import org.apache.pulsar.client.api.PulsarClient;
import org.apache.pulsar.client.api.PulsarClientException;
import org.apache.pulsar.client.api.Range;
import org.apache.pulsar.client.api.Reader;
import org.apache.pulsar.client.api.SubscriptionInitialPosition;

/**
 * What Pulsar's Java client gets of rows that Spark wrote, said line by line: `name: value`; of a
 * message its first letter and its length. Arguments: the broker's URL, a topic with five rows.
 */
public class Rows {
    static final int TIMEOUT_S = 60;

    public static void main(String[] arguments) throws Exception {
        String topic = arguments[1];
        try (PulsarClient client = PulsarClient.builder().serviceUrl(arguments[0]).build()) {
            MessageId large;
            try (Consumer<byte[]> consumer = subscribe(client, topic)) {
                List<Message<byte[]>> found = take(consumer, 5);
                say("rows", text(found));
                say("keys", found.stream().map(Message::getKey).toList());
                say("event times", found.stream().map(Message::getEventTime).toList());
                large = found.get(1).getMessageId();
                consumer.acknowledge(found.get(0));
                consumer.redeliverUnacknowledgedMessages();
                say("not acknowledged", text(take(consumer, 4)));
                consumer.acknowledge(large);
            }
            try (Consumer<byte[]> consumer = subscribe(client, topic)) {
                say("behind the large one", text(take(consumer, 3)));
                consumer.seek(large);
                say("after a seek", text(take(consumer, 1)));
            }
            try (Reader<byte[]> reader = client.newReader().topic(topic).startMessageId(MessageId.earliest).create()) {
                List<Message<byte[]>> found = new ArrayList<>();
                while (reader.hasMessageAvailable()) {
                    found.add(reader.readNext(TIMEOUT_S, TimeUnit.SECONDS));
                }
                say("read", text(found));
            }
            try {
                client.newReader().topic(topic).startMessageId(MessageId.earliest).keyHashRange(Range.of(0, 100)).create();
                say("a range of hashes", "none");
            } catch (PulsarClientException refused) {
                say("a range of hashes", refused.getClass().getSimpleName());
            }
        }
        System.exit(0); // its threads may linger
    }

    static Consumer<byte[]> subscribe(PulsarClient client, String topic) throws Exception {
        return client.newConsumer().topic(topic).subscriptionName("java")
                .acknowledgmentGroupTime(0, TimeUnit.SECONDS)
                .subscriptionInitialPosition(SubscriptionInitialPosition.Earliest).subscribe();
    }

    static List<Message<byte[]>> take(Consumer<byte[]> consumer, int count) throws Exception {
        List<Message<byte[]>> found = new ArrayList<>();
        while (found.size() < count) {
            Message<byte[]> one = consumer.receive(TIMEOUT_S, TimeUnit.SECONDS);
            if (one == null) {
                throw new IllegalStateException("message " + found.size() + " has not come");
            }
            found.add(one);
        }
        return found;
    }

    static List<String> text(List<Message<byte[]>> messages) {
        return messages.stream().map(Message::getData)
                .map(data -> new String(data, 0, 1, StandardCharsets.UTF_8) + data.length).toList();
    }

    static void say(String name, Object value) {
        System.out.println(name + ": " + value);
    }
}
