import java.util.TreeSet;
import java.util.concurrent.TimeUnit;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.Message;
import org.apache.pulsar.client.api.PulsarClient;
import org.apache.pulsar.client.api.Schema;
import org.apache.pulsar.client.api.SubscriptionInitialPosition;

/** Consumes by a pattern, and does not look for new topics by itself within the time of the test. */
public class Patterns {
    static final int TIMEOUT_S = 60;

    public static void main(String[] arguments) throws Exception {
        String url = arguments[0], stem = arguments[1];
        try (PulsarClient client = PulsarClient.builder().serviceUrl(url).build()) {
            Consumer<String> consumer = client.newConsumer(Schema.STRING)
                    .topicsPattern(java.util.regex.Pattern.compile(stem + "-.*"))
                    .patternAutoDiscoveryPeriod(1, TimeUnit.HOURS)
                    .subscriptionInitialPosition(SubscriptionInitialPosition.Earliest)
                    .subscriptionName("s")
                    .subscribe();
            client.newProducer(Schema.STRING).topic(stem + "-a").create().send("a");
            TreeSet<String> values = new TreeSet<>();
            while (values.size() < 5) {
                Message<String> message = consumer.receive(TIMEOUT_S, TimeUnit.SECONDS);
                values.add(message == null ? "none" : message.getValue());
                if (message == null) {
                    break;
                }
                consumer.acknowledge(message);
            }
            System.out.println(values);
            consumer.close();
        }
    }
}
