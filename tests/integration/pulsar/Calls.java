import java.io.IOException;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.nio.charset.StandardCharsets;
import java.security.KeyPair;
import java.security.KeyPairGenerator;
import java.util.ArrayList;
import java.util.Base64;
import java.util.HashMap;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Map;
import java.util.Objects;
import java.util.Set;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import org.apache.pulsar.client.api.*;

/** What checks do with clients, producers, consumers and the admin API. */
public class Calls {
    static final int TIMEOUT_S = 20;
    static String url;
    static String adminUrl;
    static PulsarClient client;

    interface Source {
        Message<?> next(int time, TimeUnit unit) throws PulsarClientException;
    }

    public static class Reading {
        public Long id;
        public String city;
    }

    /** A pair of RSA keys, made anew. */
    static class Keys implements CryptoKeyReader {
        final Map<String, byte[]> pems = new HashMap<>();

        Keys() throws Exception {
            KeyPair pair = KeyPairGenerator.getInstance("RSA").generateKeyPair();
            for (java.security.Key key : List.of(pair.getPublic(), pair.getPrivate())) {
                String kind = key == pair.getPublic() ? "PUBLIC KEY" : "PRIVATE KEY";
                String lines = Base64.getMimeEncoder().encodeToString(key.getEncoded());
                pems.put(kind, bytes("-----BEGIN " + kind + "-----\n" + lines + "\n-----END " + kind + "-----\n"));
            }
        }

        public EncryptionKeyInfo getPublicKey(String name, Map<String, String> metadata) {
            return new EncryptionKeyInfo(pems.get("PUBLIC KEY"), metadata);
        }

        public EncryptionKeyInfo getPrivateKey(String name, Map<String, String> metadata) {
            return new EncryptionKeyInfo(pems.get("PRIVATE KEY"), metadata);
        }
    }

    static class Router implements MessageRouter {
        public int choosePartition(Message<?> message, TopicMetadata topic) {
            return topic.numPartitions() - 1;
        }
    }

    record Listener(BlockingQueue<String> heard) implements ConsumerEventListener {
        public void becameActive(Consumer<?> consumer, int partition) {
            heard.add("active");
        }

        public void becameInactive(Consumer<?> consumer, int partition) {
            heard.add("inactive");
        }
    }

    static List<MessageId> send(String topic, String... values) throws Exception {
        List<MessageId> ids = new ArrayList<>();
        try (Producer<byte[]> producer = client.newProducer().topic(topic).enableBatching(false).create()) {
            for (String value : values) {
                ids.add(producer.send(bytes(value)));
            }
        }
        return ids;
    }

    static List<MessageId> batch(String topic, String... values) throws Exception {
        List<CompletableFuture<MessageId>> ids = new ArrayList<>();
        try (Producer<byte[]> producer = client.newProducer().topic(topic)
                .batchingMaxPublishDelay(1, TimeUnit.HOURS).create()) {
            for (String value : values) {
                ids.add(producer.sendAsync(bytes(value)));
            }
            producer.flush();
        }
        return ids.stream().map(CompletableFuture::join).toList();
    }

    static void sendKeys(String topic, int keys) throws Exception {
        try (Producer<byte[]> producer = client.newProducer().topic(topic).enableBatching(false).create()) {
            for (int key = 0; key < keys; key++) {
                producer.newMessage().key("key " + key).value(bytes("key " + key)).sendAsync();
            }
            producer.flush();
        }
    }

    static void sendReading(String topic, Schema<Reading> schema, long id) throws Exception {
        Reading reading = new Reading();
        reading.id = id;
        reading.city = "Bern";
        try (Producer<Reading> producer = client.newProducer(schema).topic(topic).create()) {
            producer.send(reading);
        }
    }

    static <T> void keeps(String topic, Schema<T> schema, T value) throws Exception {
        try (Producer<T> producer = client.newProducer(schema).topic(topic).create()) {
            producer.send(value);
        }
        same(value, take(typed(topic, schema), 1).get(0).getValue());
    }

    static CompletableFuture<Producer<byte[]>> producer(String topic, ProducerAccessMode mode) {
        return client.newProducer().topic(topic).accessMode(mode).createAsync();
    }

    static ConsumerBuilder<byte[]> consumer(String topic, String name) {
        return client.newConsumer().topic(topic).subscriptionName(name)
                .negativeAckRedeliveryDelay(100, TimeUnit.MILLISECONDS)
                .subscriptionInitialPosition(SubscriptionInitialPosition.Earliest);
    }

    static ConsumerBuilder<byte[]> shared(String topic) {
        return consumer(topic, "s").subscriptionType(SubscriptionType.Shared);
    }

    static ConsumerBuilder<byte[]> keyShared(String topic, KeySharedPolicy policy) {
        return consumer(topic, "s").subscriptionType(SubscriptionType.Key_Shared).keySharedPolicy(policy);
    }

    static Consumer<byte[]> subscribe(String topic, String name) throws PulsarClientException {
        return consumer(topic, name).subscribe();
    }

    static <T> Consumer<T> typed(String topic, Schema<T> schema) throws PulsarClientException {
        return client.newConsumer(schema).topic(topic).subscriptionName("typed")
                .subscriptionInitialPosition(SubscriptionInitialPosition.Earliest).subscribe();
    }

    static <T> List<Message<T>> take(Consumer<T> consumer, int count) throws Exception {
        List<Message<T>> found = new ArrayList<>();
        while (found.size() < count) {
            Message<T> message = consumer.receive(TIMEOUT_S, TimeUnit.SECONDS);
            if (message == null) {
                throw new AssertionError("after " + texts(found) + " nothing came");
            }
            found.add(message);
        }
        return found;
    }

    static List<Message<byte[]>> rest(Consumer<byte[]> consumer) throws Exception {
        List<Message<byte[]>> found = new ArrayList<>();
        for (Message<byte[]> one; (one = consumer.receive(1, TimeUnit.SECONDS)) != null;) {
            found.add(one);
        }
        return found;
    }

    static void acked(Consumer<byte[]> consumer, List<Message<byte[]>> messages) throws Exception {
        for (Message<byte[]> message : messages) {
            consumer.acknowledge(message);
        }
    }

    static List<String> left(Reader<byte[]> reader) throws Exception {
        List<String> found = new ArrayList<>();
        while (reader.hasMessageAvailable()) {
            found.add(text(reader.readNext(TIMEOUT_S, TimeUnit.SECONDS)));
        }
        return found;
    }

    /** The messages of each source, until all have `count` together. */
    static List<List<Message<?>>> gathered(int count, Source... sources) throws Exception {
        List<List<Message<?>>> found = new ArrayList<>();
        for (Source source : sources) {
            found.add(new ArrayList<>());
        }
        eventually(() -> {
            for (int number = 0; number < sources.length; number++) {
                for (Message<?> one; (one = sources[number].next(20, TimeUnit.MILLISECONDS)) != null;) {
                    found.get(number).add(one);
                }
            }
            return found.stream().mapToInt(List::size).sum() >= count;
        });
        return found;
    }

    /** Each of two has some of the keys, none is at both, and those of a key are in order. */
    static void apart(int keys, List<List<Message<?>>> found) {
        List<Set<String>> sets = new ArrayList<>();
        for (List<Message<?>> messages : found) {
            sets.add(new LinkedHashSet<>(messages.stream().map(Message::getKey).toList()));
            Map<String, MessageId> last = new HashMap<>();
            for (Message<?> message : messages) {
                MessageId before = last.put(message.getKey(), message.getMessageId());
                same(true, before == null || before.compareTo(message.getMessageId()) < 0);
            }
        }
        same(List.of(false, false), sets.stream().map(Set::isEmpty).toList());
        same(keys, sets.get(0).size() + sets.get(1).size());
        sets.get(0).retainAll(sets.get(1));
        same(Set.of(), sets.get(0));
    }

    static void partitioned(String topic, int partitions) throws Exception {
        asked("PUT", path(topic) + "/partitions", "" + partitions);
    }

    static String path(String topic) {
        return topic.replace("://", "/");
    }

    static String asked(String method, String path, String body) throws Exception {
        HttpRequest.BodyPublisher sent = body == null ? HttpRequest.BodyPublishers.noBody() : HttpRequest.BodyPublishers.ofString(body);
        HttpRequest request = HttpRequest.newBuilder(URI.create(adminUrl + "/admin/v2/" + path))
                .header("Content-Type", "application/json").method(method, sent).build();
        HttpResponse<String> response = HttpClient.newBuilder().followRedirects(HttpClient.Redirect.ALWAYS).build()
                .send(request, HttpResponse.BodyHandlers.ofString());
        if (response.statusCode() >= 300 && response.statusCode() != 409) {
            throw new IOException(method + " " + path + ": " + response.statusCode() + " " + response.body());
        }
        return response.body();
    }

    static <E extends Throwable> String refused(Class<E> kind, java.util.concurrent.Callable<?> call) throws Exception {
        try {
            call.call();
        } catch (Throwable failed) {
            if (kind.isInstance(failed)) {
                return failed.getMessage();
            }
            throw failed;
        }
        throw new AssertionError("no " + kind.getSimpleName());
    }

    static void eventually(java.util.concurrent.Callable<Boolean> holds) throws Exception {
        long end = System.nanoTime() + TimeUnit.SECONDS.toNanos(TIMEOUT_S);
        while (!holds.call()) {
            if (System.nanoTime() > end) {
                throw new AssertionError("not within " + TIMEOUT_S + " s");
            }
            Thread.sleep(20);
        }
    }

    static void same(Object expected, Object found) {
        if (!Objects.equals(expected, found)) {
            throw new AssertionError("expected " + expected + ", got " + found);
        }
    }

    static String polled(BlockingQueue<String> found) throws InterruptedException {
        return found.poll(TIMEOUT_S, TimeUnit.SECONDS);
    }

    static byte[] bytes(String text) {
        return text.getBytes(StandardCharsets.UTF_8);
    }

    static String text(byte[] data) {
        return new String(data, StandardCharsets.UTF_8);
    }

    static String text(Message<?> message) {
        return text(message.getData());
    }

    static List<String> texts(List<? extends Message<?>> messages) {
        return messages.stream().map(Calls::text).toList();
    }
}
