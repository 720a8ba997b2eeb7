import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.TimeUnit;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.Message;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.PulsarClient;

/**
 * Sends three messages and receives them, over one URL after another, with a client for each, and
 * says which came: `URL: values`. Arguments: a topic, the URLs.
 */
public class Address {
    static final int MESSAGES = 3, TIMEOUT_S = 60;

    public static void main(String[] arguments) throws Exception {
        for (int url = 1; url < arguments.length; url++) {
            System.out.println(arguments[url] + ": " + sentAndReceived(arguments[url], arguments[0]));
        }
        System.exit(0); // its threads may linger
    }

    static List<String> sentAndReceived(String url, String topic) throws Exception {
        List<String> values = new ArrayList<>();
        try (PulsarClient client = PulsarClient.builder().serviceUrl(url).build();
                Consumer<byte[]> consumer = client.newConsumer().topic(topic).subscriptionName("java").subscribe();
                Producer<byte[]> producer = client.newProducer().topic(topic).create()) {
            for (int i = 0; i < MESSAGES; i++) {
                producer.send(("v" + i).getBytes(StandardCharsets.UTF_8));
            }
            for (int i = 0; i < MESSAGES; i++) {
                Message<byte[]> message = consumer.receive(TIMEOUT_S, TimeUnit.SECONDS);
                values.add(new String(message.getData(), StandardCharsets.UTF_8));
                consumer.acknowledge(message);
            }
        }
        return values;
    }
}
