import java.time.Instant;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeSet;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;
import java.util.regex.Pattern;
import org.apache.pulsar.client.api.*;
import org.apache.pulsar.client.api.schema.GenericRecord;
import org.apache.pulsar.client.api.transaction.Transaction;
import org.apache.pulsar.common.schema.KeyValue;
import org.apache.pulsar.common.schema.KeyValueEncodingType;

/**
 * What a user of Pulsar's Java client expects of a cluster: a check by name for each, on a topic of
 * its own. Prints `OK name` or `FAILED name: why`, `AGAIN name: why` where a second try decides, and
 * `n of m`. Arguments: the URLs of the broker and of its admin API, how the names of topics begin; a
 * text, to run the checks whose names have it.
 */
public class Checks extends Calls {
    static final int AT_ONCE = 12;
    static final String TEXT = "0123456789".repeat(20);

    interface Check {
        void run(String topic) throws Exception;
    }

    public static class Grown {
        public static class Reading {
            public Long id;
            public String city;
            public Double value;
        }
    }

    public static class Wrong {
        public static class Reading {
            public Boolean id;
        }
    }

    static final Map<String, Check> CHECKS = new LinkedHashMap<>();

    public static void main(String[] arguments) throws Exception {
        url = arguments[0];
        adminUrl = arguments[1];
        client = PulsarClient.builder().serviceUrl(url).statsInterval(0, TimeUnit.SECONDS).build();
        asked("PUT", "namespaces/public/once", "{}");
        asked("POST", "namespaces/public/once/deduplication", "true");
        producers();
        consumers();
        again();
        positions();
        keys();
        schemas();
        topics();
        ExecutorService pool = Executors.newFixedThreadPool(AT_ONCE);
        List<CompletableFuture<Boolean>> done = new ArrayList<>();
        CHECKS.keySet().removeIf(name -> arguments.length > 3 && !name.contains(arguments[3]));
        for (Map.Entry<String, Check> one : CHECKS.entrySet()) {
            String topic = "persistent://public/default/" + arguments[2] + "-" + done.size();
            done.add(CompletableFuture.supplyAsync(() -> passes(one.getKey(), one.getValue(), topic), pool));
        }
        long passed = done.stream().filter(CompletableFuture::join).count();
        System.out.println(passed + " of " + CHECKS.size());
        System.exit(0); // its threads may linger
    }

    static void check(String name, Check check) {
        CHECKS.put(name, check);
    }

    /** A check that fails is tried once more: where the client's own threads wait for a processor,
     * an acknowledgement may be sent behind the close of its consumer, for instance. */
    static boolean passes(String name, Check check, String topic) {
        try {
            check.run(topic);
        } catch (Throwable first) {
            printed("AGAIN", name, first);
            try {
                check.run(topic + "-again");
            } catch (Throwable failed) {
                printed("FAILED", name, failed);
                return false;
            }
        }
        System.out.println("OK " + name);
        return true;
    }

    static void printed(String word, String name, Throwable failed) {
        System.out.println((word + " " + name + ": " + failed).replace('\n', ' '));
    }

    static void producers() {
        check("messages of a batch share an entry and come in their order", topic -> {
            List<MessageId> ids = batch(topic, "a", "b", "c");
            same(1L, ids.stream().map(id -> ((MessageIdAdv) id).getEntryId()).distinct().count());
            same(List.of(0, 1, 2), ids.stream().map(id -> ((MessageIdAdv) id).getBatchIndex()).toList());
            same(List.of("a", "b", "c"), texts(take(subscribe(topic, "s"), 3)));
        });
        check("a message above the limit of a chunk comes whole", topic -> {
            try (Producer<byte[]> producer = client.newProducer().topic(topic).enableBatching(false)
                    .enableChunking(true).chunkMaxMessageSize(100).create()) {
                producer.send(bytes(TEXT.repeat(5)));
                producer.send(bytes("small"));
            }
            same(List.of(TEXT.repeat(5), "small"), texts(take(subscribe(topic, "s"), 2)));
        });
        check("keys, properties, event time and a value that is null come as they were sent", topic -> {
            byte[] key = {0, (byte) 0xff};
            try (Producer<byte[]> producer = client.newProducer().topic(topic).create()) {
                producer.newMessage().key("k").orderingKey(bytes("o")).property("p", "1").eventTime(1_600_000_000_123L)
                        .value(bytes("v")).send();
                producer.newMessage().keyBytes(key).value(null).send();
            }
            List<Message<byte[]>> found = take(subscribe(topic, "s"), 2);
            Message<byte[]> first = found.get(0);
            same(List.of("k", "o", Map.of("p", "1"), 1_600_000_000_123L, "v"), List.of(first.getKey(),
                    text(first.getOrderingKey()), first.getProperties(), first.getEventTime(), text(first)));
            same(true, Arrays.equals(key, found.get(1).getKeyBytes()) && found.get(1).getValue() == null);
        });
        check("with deduplication a message that is sent again is stored once", topic -> {
            String once = topic.replace("/default/", "/once/");
            for (int from : new int[] {0, 2}) { // the second one sends 2 again
                try (Producer<byte[]> producer = client.newProducer().topic(once).producerName("p")
                        .enableBatching(false).create()) {
                    same(from - 1L + from / 2, producer.getLastSequenceId());
                    for (int number = from; number < from + 3; number++) {
                        producer.newMessage().sequenceId(number).value(bytes("" + number)).send();
                    }
                }
            }
            same(List.of("0", "1", "2", "3", "4"), texts(take(subscribe(once, "s"), 5)));
        });
        check("batches of LZ4, ZLIB, ZSTD and SNAPPY come as they were", topic -> {
            for (CompressionType kind : CompressionType.values()) {
                try (Producer<byte[]> producer = client.newProducer().topic(topic).compressionType(kind)
                        .compressionMinMsgBodySize(0).create()) {
                    producer.send(bytes(kind + TEXT));
                }
            }
            List<String> sent = Arrays.stream(CompressionType.values()).map(kind -> kind + TEXT).toList();
            same(sent, texts(take(subscribe(topic, "s"), sent.size())));
        });
        check("an exclusive producer keeps others out, and so does a producer with a name", topic -> {
            producer(topic, ProducerAccessMode.Exclusive).get(TIMEOUT_S, TimeUnit.SECONDS);
            refused(PulsarClientException.ProducerBusyException.class, () -> client.newProducer().topic(topic).create());
            client.newProducer().topic(topic + "-named").producerName("p").create();
            refused(PulsarClientException.ProducerBusyException.class,
                    () -> client.newProducer().topic(topic + "-named").producerName("p").create());
        });
        check("a producer that waits is admitted when the one before it closes", topic -> {
            Producer<byte[]> first = producer(topic, ProducerAccessMode.Exclusive).get(TIMEOUT_S, TimeUnit.SECONDS);
            CompletableFuture<Producer<byte[]>> next = producer(topic, ProducerAccessMode.WaitForExclusive);
            first.send(bytes("first"));
            same(false, next.isDone());
            first.close();
            next.get(TIMEOUT_S, TimeUnit.SECONDS).send(bytes("next"));
            same(List.of("first", "next"), texts(take(subscribe(topic, "s"), 2)));
        });
        check("a producer that fences takes the topic from the one before it", topic -> {
            Producer<byte[]> first = producer(topic, ProducerAccessMode.Exclusive).get(TIMEOUT_S, TimeUnit.SECONDS);
            Producer<byte[]> next = producer(topic, ProducerAccessMode.ExclusiveWithFencing).get(TIMEOUT_S, TimeUnit.SECONDS);
            refused(PulsarClientException.ProducerFencedException.class, () -> first.send(bytes("first")));
            next.send(bytes("next"));
            same(List.of("next"), texts(take(subscribe(topic, "s"), 1)));
        });
        check("an encrypted message is read with its key alone", topic -> {
            Keys keys = new Keys();
            try (Producer<byte[]> producer = client.newProducer().topic(topic).addEncryptionKey("mine")
                    .cryptoKeyReader(keys).create()) {
                producer.send(bytes("secret"));
            }
            Consumer<byte[]> reading = consumer(topic, "with").cryptoKeyReader(keys).subscribe();
            same(List.of("secret"), texts(take(reading, 1)));
            Message<byte[]> sealed = take(consumer(topic, "without")
                    .cryptoFailureAction(ConsumerCryptoFailureAction.CONSUME).subscribe(), 1).get(0);
            same(List.of(true, false), List.of(sealed.getEncryptionCtx().isPresent(), text(sealed.getData()).contains("secret")));
        });
        check("batches by key have messages of a single key", topic -> {
            try (Producer<byte[]> producer = client.newProducer().topic(topic).batcherBuilder(BatcherBuilder.KEY_BASED)
                    .batchingMaxPublishDelay(1, TimeUnit.HOURS).create()) {
                for (int number = 0; number < 8; number++) {
                    producer.newMessage().key("k" + number % 2).value(bytes("" + number)).sendAsync();
                }
                producer.flush();
            }
            Map<Long, Set<String>> entries = new HashMap<>();
            for (Message<byte[]> one : take(subscribe(topic, "s"), 8)) {
                entries.computeIfAbsent(((MessageIdAdv) one.getMessageId()).getEntryId(), id -> new TreeSet<>()).add(one.getKey());
            }
            same(Set.of(Set.of("k0"), Set.of("k1")), Set.copyOf(entries.values()));
        });
    }

    static void consumers() {
        check("an Exclusive subscription has one consumer", topic -> {
            subscribe(topic, "s");
            refused(PulsarClientException.ConsumerBusyException.class, () -> subscribe(topic, "s"));
        });
        check("a Failover consumer goes on where the one before it stopped", topic -> {
            send(topic, "a", "b", "c", "d");
            Consumer<byte[]> first = consumer(topic, "s").subscriptionType(SubscriptionType.Failover).consumerName("1")
                    .isAckReceiptEnabled(true).subscribe();
            BlockingQueue<String> active = new LinkedBlockingQueue<>();
            Consumer<byte[]> next = consumer(topic, "s").subscriptionType(SubscriptionType.Failover).consumerName("2")
                    .consumerEventListener(new Listener(active)).subscribe();
            acked(first, take(first, 2));
            first.close();
            same(List.of("c", "d"), texts(take(next, 2)));
            same(true, active.contains("active"));
        });
        check("consumers of a Shared subscription get no more than they have room for", topic -> {
            Consumer<byte[]> small = shared(topic).receiverQueueSize(2).subscribe();
            Consumer<byte[]> large = shared(topic).subscribe();
            send(topic, "0", "1", "2", "3", "4", "5", "6", "7", "8", "9");
            Set<String> found = new TreeSet<>(texts(take(large, 8)));
            small.close();
            found.addAll(texts(take(large, 2)));
            same(10, found.size());
        });
        check("a consumer of a better priority is served first", topic -> {
            Consumer<byte[]> second = shared(topic).priorityLevel(1).subscribe();
            Consumer<byte[]> first = shared(topic).priorityLevel(0).subscribe();
            send(topic, "a", "b", "c");
            same(List.of("a", "b", "c"), texts(take(first, 3)));
            first.close();
            same(Set.of("a", "b", "c"), Set.copyOf(texts(take(second, 3))));
        });
        check("a consumer that pauses gets nothing until it resumes", topic -> {
            Consumer<byte[]> pausing = shared(topic).startPaused(true).subscribe();
            Consumer<byte[]> other = shared(topic).subscribe();
            send(topic, "a", "b", "c");
            acked(other, take(other, 3));
            other.close();
            pausing.resume();
            send(topic, "d");
            same(List.of("d"), texts(take(pausing, 1)));
        });
        check("a batch is received at once", topic -> {
            Consumer<byte[]> consumer = consumer(topic, "s").batchReceivePolicy(BatchReceivePolicy.builder()
                    .maxNumMessages(3).timeout(TIMEOUT_S, TimeUnit.SECONDS).build()).subscribe();
            send(topic, "a", "b", "c", "d");
            Messages<byte[]> messages = consumer.batchReceive();
            same(3, messages.size());
            consumer.acknowledge(messages);
        });
        check("a listener gets all messages in order", topic -> {
            BlockingQueue<String> found = new LinkedBlockingQueue<>();
            consumer(topic, "s").messageListener((consumer, message) -> found.add(text(message))).subscribe();
            send(topic, "a", "b", "c");
            same(List.of("a", "b", "c"), List.of(polled(found), polled(found), polled(found)));
        });
        check("a consumer without a queue gets one message at a time", topic -> {
            Consumer<byte[]> consumer = consumer(topic, "s").receiverQueueSize(0).subscribe();
            send(topic, "a", "b");
            for (String value : List.of("a", "b")) {
                same(value, text(consumer.receiveAsync().get(TIMEOUT_S, TimeUnit.SECONDS)));
            }
        });
        check("after unsubscribing a subscription begins anew", topic -> {
            Consumer<byte[]> consumer = subscribe(topic, "s");
            send(topic, "a");
            consumer.unsubscribe();
            Consumer<byte[]> next = client.newConsumer().topic(topic).subscriptionName("s").subscribe(); // at the end
            send(topic, "b");
            same(List.of("b"), texts(take(next, 1)));
        });
        check("a subscription that is not durable ends with its consumer", topic -> {
            Consumer<byte[]> consumer = consumer(topic, "gone").subscriptionMode(SubscriptionMode.NonDurable).subscribe();
            subscribe(topic, "stays");
            consumer.close();
            same("[\"stays\"]", asked("GET", path(topic) + "/subscriptions", null));
        });
        check("a consumer of the end of a terminated topic learns of it", topic -> {
            Consumer<byte[]> consumer = subscribe(topic, "s");
            Producer<byte[]> producer = client.newProducer().topic(topic).create();
            producer.send(bytes("a"));
            asked("POST", path(topic) + "/terminate", "");
            acked(consumer, take(consumer, 1));
            eventually(consumer::hasReachedEndOfTopic);
            refused(PulsarClientException.TopicTerminatedException.class, () -> producer.send(bytes("b")));
        });
    }

    static void again() {
        check("what is not acknowledged after all comes again, with a count", topic -> {
            Consumer<byte[]> consumer = shared(topic).subscribe();
            send(topic, "a", "b");
            acked(consumer, take(consumer, 1));
            for (int count = 0; count < 3; count++) {
                Message<byte[]> message = take(consumer, 1).get(0);
                same("b " + count, text(message) + " " + message.getRedeliveryCount());
                consumer.negativeAcknowledge(message);
            }
        });
        check("what is not acknowledged in time comes again", topic -> {
            Consumer<byte[]> consumer = shared(topic).ackTimeout(1, TimeUnit.SECONDS)
                    .ackTimeoutTickTime(100, TimeUnit.MILLISECONDS).subscribe();
            send(topic, "a");
            same(List.of("a", "a"), texts(take(consumer, 2)));
        });
        check("a consumer may ask for all again that is not acknowledged", topic -> {
            Consumer<byte[]> consumer = consumer(topic, "s").isAckReceiptEnabled(true).subscribe(); // acknowledges at once
            send(topic, "a", "b", "c");
            consumer.acknowledge(take(consumer, 3).get(0));
            consumer.redeliverUnacknowledgedMessages();
            same(List.of("b", "c"), texts(take(consumer, 2)));
        });
        check("acknowledging cumulatively acknowledges all before", topic -> {
            Consumer<byte[]> consumer = consumer(topic, "s").isAckReceiptEnabled(true).subscribe();
            send(topic, "a", "b", "c", "d");
            consumer.acknowledgeCumulative(take(consumer, 3).get(2));
            consumer.close();
            same(List.of("d"), texts(take(subscribe(topic, "s"), 1)));
        });
        check("messages of a batch are acknowledged one by one", topic -> {
            batch(topic, "0", "1", "2", "3", "4");
            Consumer<byte[]> consumer = consumer(topic, "s").enableBatchIndexAcknowledgment(true)
                    .isAckReceiptEnabled(true).subscribe();
            List<Message<byte[]>> found = take(consumer, 5);
            acked(consumer, List.of(found.get(1), found.get(3)));
            consumer.close();
            Consumer<byte[]> next = consumer(topic, "s").enableBatchIndexAcknowledgment(true).subscribe();
            same(List.of("0", "2", "4"), texts(take(next, 3)));
        });
        check("after the receipt of an acknowledgement a message does not come again", topic -> {
            Consumer<byte[]> consumer = shared(topic).isAckReceiptEnabled(true).subscribe();
            send(topic, "a", "b", "c");
            List<Message<byte[]>> found = take(consumer, 3);
            consumer.acknowledge(List.of(found.get(0).getMessageId(), found.get(2).getMessageId()));
            asked("PUT", path(topic) + "/unload", "");
            // it is not closed now: a client closes the connection of all its consumers if one is closed while it subscribes again
            same(List.of("b"), texts(take(consumer, 1)));
            send(topic, "end");
            same(List.of("end"), texts(take(consumer, 1)));
        });
        check("what fails too often is a dead letter", topic -> {
            Consumer<byte[]> consumer = shared(topic).deadLetterPolicy(DeadLetterPolicy.builder().maxRedeliverCount(1)
                    .initialSubscriptionName("kept").build()).subscribe();
            MessageId id = send(topic, "a", "b").get(0);
            consumer.negativeAcknowledge(take(consumer, 2).get(0));
            consumer.negativeAcknowledge(take(consumer, 1).get(0));
            Consumer<byte[]> letters = client.newConsumer().topic(topic + "-s-DLQ").subscriptionName("kept").subscribe();
            Message<byte[]> letter = take(letters, 1).get(0); // the client makes the letter when it gets the message again
            same(List.of("a", topic, id.toString()), List.of(text(letter), letter.getProperty("REAL_TOPIC"),
                    letter.getProperty("ORIGIN_MESSAGE_ID")));
        });
        check("a message comes again from the topic of retries", topic -> {
            Consumer<byte[]> consumer = shared(topic).enableRetry(true).subscribe();
            send(topic, "a");
            consumer.reconsumeLater(take(consumer, 1).get(0), 200, TimeUnit.MILLISECONDS);
            Message<byte[]> message = take(consumer, 1).get(0);
            same(List.of("a", "1", topic + "-s-RETRY"), List.of(text(message), message.getProperty("RECONSUMETIMES"),
                    message.getTopicName()));
        });
        check("a delayed message comes after later ones", topic -> {
            Consumer<byte[]> consumer = shared(topic).subscribe();
            Producer<byte[]> producer = client.newProducer().topic(topic).create();
            producer.send(bytes("first"));
            producer.newMessage().deliverAfter(3, TimeUnit.SECONDS).value(bytes("late")).sendAsync();
            producer.newMessage().deliverAt(System.currentTimeMillis() - 1).value(bytes("due")).sendAsync();
            producer.sendAsync(bytes("now"));
            same(List.of("first", "due", "now", "late"), texts(take(consumer, 4)));
        });
    }

    static void positions() {
        check("seek by id goes behind the message, or to it, to the beginning or to the end", topic -> {
            List<MessageId> ids = send(topic, "a", "b", "c");
            Consumer<byte[]> consumer = subscribe(topic, "s");
            same(0, consumer.getLastMessageIds().get(0).compareTo(ids.get(2)));
            consumer.seek(MessageId.fromByteArray(ids.get(0).toByteArray()));
            same(List.of("b"), texts(take(consumer, 1)));
            consumer.seek(MessageId.latest);
            send(topic, "d");
            same(List.of("d"), texts(take(consumer, 1)));
            consumer.seek(MessageId.earliest);
            same(List.of("a", "b", "c", "d"), texts(take(consumer, 4)));
            Consumer<byte[]> at = consumer(topic, "at").startMessageIdInclusive().subscribe();
            at.seek(ids.get(1));
            same(List.of("b"), texts(take(at, 1)));
        });
        check("seek by time goes to the first message that is not older", topic -> {
            send(topic, "a");
            Thread.sleep(50); // the time of b is another one
            send(topic, "b");
            Consumer<byte[]> consumer = subscribe(topic, "s");
            long time = take(consumer, 2).get(1).getPublishTime();
            consumer.seek(time);
            same(List.of("b"), texts(take(consumer, 1)));
        });
        check("a consumer of partitions seeks in all of them", topic -> {
            partitioned(topic, 2);
            Consumer<byte[]> consumer = subscribe(topic, "s");
            send(topic, "a", "b", "c", "d");
            acked(consumer, take(consumer, 4));
            long ago = System.currentTimeMillis() - 3_600_000;
            eventually(() -> { // the client drops what comes while it seeks in another partition
                consumer.seek(ago);
                return Set.of("a", "b", "c", "d").equals(Set.copyOf(texts(rest(consumer))));
            });
            eventually(() -> {
                consumer.seek(partition -> partition.endsWith("-0") ? MessageId.earliest : MessageId.latest);
                List<Message<byte[]>> found = rest(consumer);
                return found.size() == 2 && found.stream().allMatch(one -> one.getTopicName().endsWith("-0"));
            });
        });
        check("readers begin at the beginning or the end, and read until no message is left", topic -> {
            send(topic, "a", "b");
            Reader<byte[]> first = client.newReader().topic(topic).startMessageId(MessageId.earliest).create();
            Reader<byte[]> last = client.newReader().topic(topic).startMessageId(MessageId.latest).create();
            same(List.of("a", "b"), left(first));
            same(false, last.hasMessageAvailable());
            send(topic, "c");
            same(List.of(List.of("c"), List.of("c")), List.of(left(first), left(last)));
        });
        check("a reader starts at an id, behind it, or some time ago", topic -> {
            List<MessageId> ids = send(topic, "a", "b", "c");
            ReaderBuilder<byte[]> builder = client.newReader().topic(topic);
            same(List.of("c"), left(builder.clone().startMessageId(ids.get(1)).create()));
            same(List.of("b", "c"), left(builder.clone().startMessageId(ids.get(1)).startMessageIdInclusive().create()));
            Reader<byte[]> ago = builder.clone().startMessageFromRollbackDuration(1, TimeUnit.HOURS).create();
            same(List.of("a", "b", "c"), texts(gathered(3, ago::readNext).get(0)));
        });
        check("readers of ranges of hashes share the keys", topic -> {
            sendKeys(topic, 20);
            ReaderBuilder<byte[]> builder = client.newReader().topic(topic).startMessageId(MessageId.earliest);
            Reader<byte[]> low = builder.clone().keyHashRange(Range.of(0, 32767)).create();
            Reader<byte[]> high = builder.clone().keyHashRange(Range.of(32768, 65535)).create();
            apart(20, gathered(20, low::readNext, high::readNext));
        });
    }

    static void keys() {
        check("in a Key_Shared subscription the messages of a key are at one consumer, in order", topic -> {
            Consumer<byte[]> first = keyShared(topic, KeySharedPolicy.autoSplitHashRange()).subscribe();
            Consumer<byte[]> second = keyShared(topic, KeySharedPolicy.autoSplitHashRange()).subscribe();
            sendKeys(topic, 40);
            sendKeys(topic, 40);
            List<List<Message<?>>> found = gathered(80, first::receive, second::receive);
            apart(40, found);
            first.close();
            same(texts(found.get(0)), texts(take(second, found.get(0).size())));
        });
        check("consumers with ranges of hashes get the keys in them", topic -> {
            Consumer<byte[]> low = keyShared(topic, KeySharedPolicy.stickyHashRange().ranges(Range.of(0, 32767))).subscribe();
            Consumer<byte[]> high = keyShared(topic, KeySharedPolicy.stickyHashRange().ranges(Range.of(32768, 65535))).subscribe();
            sendKeys(topic, 20);
            apart(20, gathered(20, low::receive, high::receive));
            refused(PulsarClientException.ConsumerAssignException.class,
                    () -> keyShared(topic, KeySharedPolicy.stickyHashRange().ranges(Range.of(100, 200))).subscribe());
        });
    }

    static void schemas() {
        check("text, numbers, truth values and times keep their types", topic -> {
            keeps(topic + "-text", Schema.STRING, "é");
            keeps(topic + "-long", Schema.INT64, -5L);
            keeps(topic + "-double", Schema.DOUBLE, 0.5);
            keeps(topic + "-bool", Schema.BOOL, true);
            keeps(topic + "-instant", Schema.INSTANT, Instant.ofEpochSecond(1_600_000_000, 5));
        });
        check("objects of JSON and of AVRO are objects again", topic -> {
            for (Schema<Reading> schema : List.of(Schema.JSON(Reading.class), Schema.AVRO(Reading.class))) {
                String name = topic + schema.getSchemaInfo().getType();
                sendReading(name, schema, 7);
                Reading found = take(typed(name, schema), 1).get(0).getValue();
                same("7 Bern", found.id + " " + found.city);
            }
        });
        check("pairs of key and value come as one value, or with the key as the message's", topic -> {
            for (KeyValueEncodingType kind : KeyValueEncodingType.values()) {
                Schema<KeyValue<String, Integer>> schema = Schema.KeyValue(Schema.STRING, Schema.INT32, kind);
                keeps(topic + "-" + kind, schema, new KeyValue<>("k", 5));
            }
        });
        check("a consumer without a class for the values gets records", topic -> {
            sendReading(topic, Schema.AVRO(Reading.class), 7);
            GenericRecord record = take(typed(topic, Schema.AUTO_CONSUME()), 1).get(0).getValue();
            same("7 Bern", record.getField("id") + " " + record.getField("city"));
        });
        check("bytes of a topic's schema are sent as they are, others are refused", topic -> {
            sendReading(topic, Schema.JSON(Reading.class), 7);
            Producer<byte[]> producer = client.newProducer(Schema.AUTO_PRODUCE_BYTES()).topic(topic).create();
            producer.send(bytes("{\"id\": 8, \"city\": \"Bern\"}"));
            refused(SchemaSerializationException.class, () -> producer.send(bytes("none")));
            same(8L, take(typed(topic, Schema.JSON(Reading.class)), 2).get(1).getValue().id);
        });
        check("a schema grows, and readers of both versions read all", topic -> {
            sendReading(topic, Schema.AVRO(Reading.class), 7);
            Grown.Reading grown = new Grown.Reading();
            grown.id = 8L;
            try (Producer<Reading> producer = client.newProducer(Schema.AVRO(Reading.class)).topic(topic).create()) {
                producer.newMessage(Schema.AVRO(Grown.Reading.class)).value(grown).send();
            }
            List<Message<Grown.Reading>> found = take(typed(topic, Schema.AVRO(Grown.Reading.class)), 2);
            same(List.of(7L, 8L), found.stream().map(one -> one.getValue().id).toList());
            same(List.of(0, 1), found.stream().map(one -> (int) one.getSchemaVersion()[7]).toList());
            Consumer<Reading> old = client.newConsumer(Schema.AVRO(Reading.class)).topic(topic).subscriptionName("old")
                    .subscriptionInitialPosition(SubscriptionInitialPosition.Earliest).subscribe();
            same(List.of(7L, 8L), take(old, 2).stream().map(one -> one.getValue().id).toList());
        });
        check("a schema that does not fit is refused with the reason", topic -> {
            sendReading(topic, Schema.AVRO(Reading.class), 7);
            String reason = refused(PulsarClientException.IncompatibleSchemaException.class,
                    () -> client.newProducer(Schema.AVRO(Wrong.Reading.class)).topic(topic).create());
            same(true, reason.contains("long") && reason.contains("boolean"));
            refused(PulsarClientException.IncompatibleSchemaException.class, () -> typed(topic, Schema.INT32));
        });
    }

    static void topics() {
        check("messages of a key are in one partition, others in all or where a router puts them", topic -> {
            partitioned(topic, 3);
            Consumer<byte[]> consumer = subscribe(topic, "s");
            try (Producer<byte[]> producer = client.newProducer().topic(topic).enableBatching(false).create()) {
                for (int number = 0; number < 6; number++) {
                    producer.send(bytes("any"));
                    producer.newMessage().key("k").value(bytes("keyed")).send();
                }
            }
            try (Producer<byte[]> producer = client.newProducer().topic(topic).messageRouter(new Router()).create()) {
                producer.send(bytes("routed"));
            }
            Map<String, Set<String>> found = new HashMap<>();
            take(consumer, 13).forEach(one -> found.computeIfAbsent(text(one), any -> new TreeSet<>()).add(one.getTopicName()));
            same(List.of(1, 3, Set.of(topic + "-partition-2")),
                    List.of(found.get("keyed").size(), found.get("any").size(), found.get("routed")));
        });
        check("producers and consumers find partitions that are added", topic -> {
            partitioned(topic, 1);
            Consumer<byte[]> consumer = consumer(topic, "s").autoUpdatePartitionsInterval(1, TimeUnit.SECONDS).subscribe();
            Producer<byte[]> producer = client.newProducer().topic(topic).enableBatching(false)
                    .autoUpdatePartitionsInterval(1, TimeUnit.SECONDS).create();
            asked("POST", path(topic) + "/partitions", "3");
            eventually(() -> producer.getNumOfPartitions() == 3);
            for (int number = 0; number < 6; number++) {
                producer.send(bytes("a"));
            }
            same(3L, take(consumer, 6).stream().map(Message::getTopicName).distinct().count());
        });
        check("a client learns which partitions a topic has", topic -> {
            partitioned(topic, 2);
            same(List.of(topic + "-partition-0", topic + "-partition-1"),
                    client.getPartitionsForTopic(topic).get(TIMEOUT_S, TimeUnit.SECONDS));
            send(topic + "-alone", "a");
            same(List.of(topic + "-alone"), client.getPartitionsForTopic(topic + "-alone").get(TIMEOUT_S, TimeUnit.SECONDS));
        });
        check("a consumer by pattern gets messages of topics that come later", topic -> {
            send(topic + "-a", "a");
            Consumer<byte[]> consumer = client.newConsumer().topicsPattern(Pattern.compile(topic + "-.*"))
                    .subscriptionName("s").subscriptionInitialPosition(SubscriptionInitialPosition.Earliest).subscribe();
            same(List.of("a"), texts(take(consumer, 1)));
            send(topic + "-b", "b");
            same(List.of("b"), texts(take(consumer, 1)));
        });
        check("a topic in memory serves the consumers that are there", topic -> {
            String memory = topic.replace("persistent://", "non-persistent://");
            Consumer<byte[]> first = subscribe(memory, "1");
            Consumer<byte[]> second = subscribe(memory, "2");
            send(memory, "a", "b");
            same(List.of("a", "b"), texts(take(first, 2)));
            same(List.of("a", "b"), texts(take(second, 2)));
        });
        check("a table view has the last value of each key", topic -> {
            Producer<String> producer = client.newProducer(Schema.STRING).topic(topic).create();
            for (String[] pair : new String[][] {{"k", "1"}, {"l", "2"}, {"m", "3"}, {"k", "4"}, {"l", null}}) {
                producer.newMessage().key(pair[0]).value(pair[1]).send();
            }
            TableView<String> view = client.newTableView(Schema.STRING).topic(topic).create();
            same(Map.of("k", "4", "m", "3"), Map.ofEntries(view.entrySet().toArray(Map.Entry[]::new)));
            producer.newMessage().key("n").value("5").send();
            eventually(() -> "5".equals(view.get("n")));
        });
        check("a client finds its broker by HTTP", topic -> {
            try (PulsarClient other = PulsarClient.builder().serviceUrl(adminUrl).build()) {
                other.newProducer().topic(topic).create().send(bytes("a"));
            }
            same(List.of("a"), texts(take(subscribe(topic, "s"), 1)));
        });
        check("a reader of a compacted topic gets the last value of each key", topic -> {
            try (Producer<byte[]> producer = client.newProducer().topic(topic).create()) {
                producer.newMessage().key("k").value(bytes("1")).send();
                producer.newMessage().key("k").value(bytes("2")).send();
            }
            asked("PUT", path(topic) + "/compaction", "");
            eventually(() -> asked("GET", path(topic) + "/compaction", null).contains("SUCCESS"));
            Reader<byte[]> reader = client.newReader().topic(topic).readCompacted(true).startMessageId(MessageId.earliest).create();
            same(List.of("2"), left(reader));
        });
        check("messages of a transaction come once it is committed", topic -> {
            try (PulsarClient other = PulsarClient.builder().serviceUrl(url).enableTransaction(true).build()) {
                Transaction transaction = other.newTransaction().build().get(TIMEOUT_S, TimeUnit.SECONDS);
                Producer<byte[]> producer = other.newProducer().topic(topic).sendTimeout(0, TimeUnit.SECONDS).create();
                producer.newMessage(transaction).value(bytes("a")).send();
                transaction.commit().get(TIMEOUT_S, TimeUnit.SECONDS);
            }
            same(List.of("a"), texts(take(subscribe(topic, "s"), 1)));
        });
    }
}
