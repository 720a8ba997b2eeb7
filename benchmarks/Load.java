import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.util.ArrayList;
import java.util.List;
import java.util.Random;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicLong;
import java.util.concurrent.atomic.AtomicReference;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.PulsarClient;
import org.apache.pulsar.client.api.PulsarClientException;
import org.apache.pulsar.client.api.SubscriptionInitialPosition;
import org.apache.pulsar.client.api.SubscriptionType;

/**
 * Pulsar's Java client under load. Argument: the broker's URL. Each line of standard input is one
 * request, answered by one line, the seconds that it took:
 *
 *   produce TOPIC COUNT BYTES BATCHED KEYS     each message has its receipt at the end
 *   consume TOPIC COUNT TYPE CONSUMERS         a new subscription, each message acknowledged
 */
public class Load {
    static final int PENDING_MAX = 5_000, QUEUE = 1_000, TIMEOUT_S = 120;

    public static void main(String[] arguments) throws Exception {
        BufferedReader requests = new BufferedReader(new InputStreamReader(System.in));
        try (PulsarClient client = PulsarClient.builder().serviceUrl(arguments[0]).build()) {
            for (String line = requests.readLine(); line != null; line = requests.readLine()) {
                String[] words = line.split(" ");
                int count = Integer.parseInt(words[2]);
                double seconds = words[0].equals("produce")
                        ? produce(client, words[1], count, Integer.parseInt(words[3]),
                                Boolean.parseBoolean(words[4]), Integer.parseInt(words[5]))
                        : consume(client, words[1], count, SubscriptionType.valueOf(words[3]),
                                Integer.parseInt(words[4]));
                System.out.println(seconds);
                System.out.flush();
            }
        }
        System.exit(0);
    }

    static double produce(PulsarClient client, String topic, int count, int bytes, boolean batched, int keys)
            throws Exception {
        byte[] value = new byte[bytes];
        new Random(1).nextBytes(value);
        AtomicReference<Throwable> failure = new AtomicReference<>();
        try (Producer<byte[]> producer = client.newProducer().topic(topic).enableBatching(batched)
                .batchingMaxPublishDelay(10, TimeUnit.MILLISECONDS).maxPendingMessages(PENDING_MAX)
                .blockIfQueueFull(true).create()) {
            long began = System.nanoTime();
            for (int i = 0; i < count; i++) {
                var message = producer.newMessage().value(value);
                if (keys > 0) {
                    message.key("k" + i % keys);
                }
                message.sendAsync().whenComplete((id, thrown) -> {
                    if (thrown != null) {
                        failure.set(thrown);
                    }
                });
            }
            producer.flush();
            if (failure.get() != null) {
                throw new IllegalStateException(failure.get());
            }
            return (System.nanoTime() - began) / 1e9;
        }
    }

    static double consume(PulsarClient client, String topic, int count, SubscriptionType type, int number)
            throws Exception {
        AtomicLong left = new AtomicLong(count);
        CountDownLatch end = new CountDownLatch(1);
        String name = "s-" + System.nanoTime();
        List<Consumer<byte[]>> consumers = new ArrayList<>();
        long began = System.nanoTime();
        for (int i = 0; i < number; i++) {
            consumers.add(client.newConsumer().topic(topic).subscriptionName(name).subscriptionType(type)
                    .receiverQueueSize(QUEUE)
                    .subscriptionInitialPosition(SubscriptionInitialPosition.Earliest)
                    .messageListener((consumer, message) -> {
                        consumer.acknowledgeAsync(message);
                        if (left.decrementAndGet() == 0) {
                            end.countDown();
                        }
                    }).subscribe());
        }
        if (!end.await(TIMEOUT_S, TimeUnit.SECONDS)) {
            throw new IllegalStateException(left.get() + " messages of " + count + " did not come");
        }
        double seconds = (System.nanoTime() - began) / 1e9;
        for (Consumer<byte[]> consumer : consumers) {
            consumer.close();
        }
        return seconds;
    }
}
