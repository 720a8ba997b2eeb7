import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.Message;
import org.apache.pulsar.client.api.MessageId;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.ProducerAccessMode;
import org.apache.pulsar.client.api.PulsarClient;
import org.apache.pulsar.client.api.PulsarClientException;
import org.apache.pulsar.client.api.Reader;
import org.apache.pulsar.client.api.SubscriptionInitialPosition;
import org.apache.pulsar.client.api.SubscriptionType;

/**
 * What Pulsar's Java client does with a topic, said line by line: `name value`. Arguments: the
 * broker's URL, a topic, and a topic with deduplication.
 */
public class Client {
    static final int TIMEOUT_S = 60;

    public static void main(String[] arguments) throws Exception {
        String topic = arguments[1];
        try (PulsarClient client = PulsarClient.builder().serviceUrl(arguments[0]).build()) {
            List<MessageId> ids = new ArrayList<>();
            produce(client, topic, false, 0, ids);
            produce(client, topic, true, 10, ids);
            say("entries", ids.stream().map(Client::entry).distinct().count());
            say("ascending", ids.stream().sorted().toList().equals(ids));
            consume(client, topic);
            failover(client, topic);
            seek(client, topic, ids);
            read(client, topic, ids);
            refused(client, topic);
            resend(client, arguments[2]);
        }
        System.exit(0); // its threads may linger
    }

    static void produce(PulsarClient client, String topic, boolean batched, int from, List<MessageId> ids)
            throws Exception {
        try (Producer<byte[]> producer = client.newProducer().topic(topic)
                .enableBatching(batched).batchingMaxPublishDelay(1, TimeUnit.SECONDS).create()) {
            List<CompletableFuture<MessageId>> sent = new ArrayList<>();
            for (int i = from; i < from + 10; i++) {
                sent.add(producer.newMessage().key("k" + i % 3).value(bytes("j" + i))
                        .property("number", "" + i).eventTime(1_600_000_000_000L + i).sendAsync());
            }
            producer.flush();
            for (CompletableFuture<MessageId> one : sent) {
                ids.add(one.get(TIMEOUT_S, TimeUnit.SECONDS));
            }
        }
    }

    static void consume(PulsarClient client, String topic) throws Exception {
        try (Consumer<byte[]> consumer = subscribe(client, topic, "exclusive", SubscriptionType.Exclusive)) {
            List<Message<byte[]>> found = take(consumer, 20);
            say("values", text(found));
            say("keys", found.stream().map(Message::getKey).toList());
            say("properties", found.stream().map(Message::getProperties).map(Map::toString).toList().get(13));
            say("event times", found.stream().mapToLong(Message::getEventTime).sum() - 20 * 1_600_000_000_000L);
            try {
                subscribe(client, topic, "exclusive", SubscriptionType.Exclusive);
                say("a second one", "none");
            } catch (PulsarClientException refused) {
                say("a second one", refused.getClass().getSimpleName());
            }
        }
    }

    static void failover(PulsarClient client, String topic) throws Exception {
        Consumer<byte[]> first = subscribe(client, topic, "failover", SubscriptionType.Failover, "a");
        try (Consumer<byte[]> second = subscribe(client, topic, "failover", SubscriptionType.Failover, "b")) {
            take(first, 15);
            first.close();
            say("the next one goes on with", text(take(second, 5)));
        }
    }

    static void seek(PulsarClient client, String topic, List<MessageId> ids) throws Exception {
        try (Consumer<byte[]> consumer = subscribe(client, topic, "seeking", SubscriptionType.Exclusive)) {
            take(consumer, 20);
            consumer.seek(ids.get(4));
            say("after a seek", text(take(consumer, 1)));
            consumer.seek(MessageId.earliest);
            say("from the first", text(take(consumer, 1)));
            say("the last id", consumer.getLastMessageIds().get(0).equals(ids.get(19)));
        }
    }

    static void read(PulsarClient client, String topic, List<MessageId> ids) throws Exception {
        List<String> found = new ArrayList<>();
        try (Reader<byte[]> reader = client.newReader().topic(topic).startMessageId(ids.get(15)).create()) {
            while (reader.hasMessageAvailable()) {
                found.add(text(reader.readNext(TIMEOUT_S, TimeUnit.SECONDS)));
            }
        }
        say("read after an id", found);
    }

    static void refused(PulsarClient client, String topic) throws Exception {
        try (Producer<byte[]> first = client.newProducer().topic(topic + "-alone")
                .accessMode(ProducerAccessMode.Exclusive).create()) {
            client.newProducer().topic(topic + "-alone").create();
            say("a second producer", "none");
        } catch (PulsarClientException refused) {
            say("a second producer", refused.getClass().getSimpleName());
        }
    }

    static void resend(PulsarClient client, String topic) throws Exception {
        for (int from : new int[] {1, 3}) { // the second one sends 3 and 4 again
            try (Producer<byte[]> producer = client.newProducer().topic(topic).producerName("java")
                    .enableBatching(false).create()) {
                say("known before " + from, producer.getLastSequenceId());
                for (int i = from; i < from + 4; i++) {
                    producer.newMessage().sequenceId(i).value(bytes("o" + i)).send();
                }
            }
        }
    }

    static Consumer<byte[]> subscribe(PulsarClient client, String topic, String name, SubscriptionType type)
            throws PulsarClientException {
        return subscribe(client, topic, name, type, "only"); // of several the first by name is active
    }

    static Consumer<byte[]> subscribe(PulsarClient client, String topic, String name, SubscriptionType type,
            String consumer) throws PulsarClientException {
        return client.newConsumer().topic(topic).subscriptionName(name).subscriptionType(type)
                .consumerName(consumer)
                .subscriptionInitialPosition(SubscriptionInitialPosition.Earliest).subscribe();
    }

    static List<Message<byte[]>> take(Consumer<byte[]> consumer, int count) throws Exception {
        List<Message<byte[]>> found = new ArrayList<>();
        while (found.size() < count) {
            Message<byte[]> one = consumer.receive(TIMEOUT_S, TimeUnit.SECONDS);
            if (one == null) {
                throw new IllegalStateException("after " + text(found) + " nothing came");
            }
            found.add(one);
            consumer.acknowledge(one);
        }
        return found;
    }

    static String entry(MessageId id) {
        return id.toString().split(":")[1];
    }

    static byte[] bytes(String text) {
        return text.getBytes(StandardCharsets.UTF_8);
    }

    static String text(Message<byte[]> message) {
        return new String(message.getValue(), StandardCharsets.UTF_8);
    }

    static List<String> text(List<Message<byte[]>> messages) {
        return messages.stream().map(Client::text).toList();
    }

    static void say(String name, Object value) {
        System.out.println(name + ": " + value);
    }
}
