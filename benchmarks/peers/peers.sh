#!/usr/bin/env bash
# The systems this project is measured against, on loopback, from Maven jars and with their own defaults.
#   peers.sh install [NAME...]       fetch the jars (needs mvn and Java 17): kafka, spark-kafka, bk, pulsar
#   peers.sh up kafka [N]            N combined KRaft brokers (default 3) on 127.0.0.1:9092...
#   peers.sh up bookkeeper           ZooKeeper on 127.0.0.1:2182 and 3 Java bookies (journal synced)
#   peers.sh up pulsar [PORT SYNC]   Pulsar standalone (E=Qw=Qa=1) on 127.0.0.1:6650, its admin API on the port
#                                    1430 above; SYNC (true): whether its journal is synced before a receipt
#   peers.sh down                    stop what `up` started and delete its data
#   peers.sh bk-bench SIZE RATE      BookKeeper's own benchmark, E=3 Qw=3 Qa=2, 12 s
#   peers.sh spark-kafka-jars        the jars of Spark's Kafka connector, comma separated
# Everything is kept under $PEERS_HOME (default .peers, which git ignores).
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)
HOME_DIR=${PEERS_HOME:-$PWD/.peers}
RUN=$HOME_DIR/run
PYTHON=${PYTHON:-python3}
mkdir -p "$RUN"

fetch() {
  mkdir -p "$HOME_DIR/$1"
  cp "$HERE/poms/$1.xml" "$HOME_DIR/$1/pom.xml"
  (cd "$HOME_DIR/$1" && mvn -q -B dependency:copy-dependencies -DoutputDirectory=lib -DincludeScope=runtime)
  echo "$1: $(ls "$HOME_DIR/$1/lib" | wc -l) jars"
}

start() { # start LOG COMMAND...: in the background, its pid remembered for `down`
  local log=$1
  shift
  "$@" > "$log" 2>&1 &
  echo $! >> "$RUN/pids"
}

wait_for_port() { # wait_for_port PORT SECONDS
  for _ in $(seq 1 "$2"); do
    if (exec 3<> "/dev/tcp/127.0.0.1/$1") 2> /dev/null; then return 0; fi
    sleep 1
  done
  echo "nothing listens on port $1 after $2 s; see $RUN" >&2
  return 1
}

# With their defaults of 2 to 9 s brokers take each other for dead while two cores serve three of them
# and 100 partitions are written; what is under way then is answered no more.
kafka_properties() { # kafka_properties NODE BROKERS VOTERS FOLDER
  cat << P
process.roles=broker,controller
node.id=$1
controller.quorum.voters=$3
listeners=PLAINTEXT://127.0.0.1:$((9091 + $1)),CONTROLLER://127.0.0.1:$((9192 + $1))
advertised.listeners=PLAINTEXT://127.0.0.1:$((9091 + $1))
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
log.dirs=$4/data$1
offsets.topic.replication.factor=$2
transaction.state.log.replication.factor=$2
transaction.state.log.min.isr=1
min.insync.replicas=$(($2 > 1 ? 2 : 1))
num.partitions=2
default.replication.factor=$2
message.max.bytes=10485760
broker.session.timeout.ms=60000
controller.quorum.fetch.timeout.ms=30000
controller.quorum.election.timeout.ms=10000
P
}

up_kafka() {
  local brokers=${1:-3} folder=$RUN/kafka voters="" classes="$HOME_DIR/kafka/lib/*"
  mkdir -p "$folder"
  for i in $(seq 1 "$brokers"); do voters="$voters,$i@127.0.0.1:$((9192 + i))"; done
  for i in $(seq 1 "$brokers"); do
    kafka_properties "$i" "$brokers" "${voters:1}" "$folder" > "$folder/s$i.properties"
    java -Xmx256m -cp "$classes" kafka.tools.StorageTool format -t MkU3OEVBNTcwNTJENDM2Qk \
      -c "$folder/s$i.properties" >> "$folder/format.log" 2>&1
    start "$folder/k$i.log" java -Xms512m -Xmx1g -cp "$classes" kafka.Kafka "$folder/s$i.properties"
  done
  for i in $(seq 1 "$brokers"); do wait_for_port $((9091 + i)) 60; done
  sleep 5 # the brokers elect a controller after they listen
}

bookie_conf() { # bookie_conf NUMBER FOLDER
  cat << P
bookiePort=$((3280 + $1))
allowLoopback=true
advertisedAddress=127.0.0.1
metadataServiceUri=zk+hierarchical://127.0.0.1:2182/ledgers
journalDirectories=$2/j$1
ledgerDirectories=$2/l$1
indexDirectories=$2/l$1
ledgerStorageClass=org.apache.bookkeeper.bookie.storage.ldb.DbLedgerStorage
dbStorage_writeCacheMaxSizeMb=128
dbStorage_readAheadCacheMaxSizeMb=128
dbStorage_rocksDB_blockCacheSize=16777216
diskUsageThreshold=0.99
diskUsageWarnThreshold=0.98
P
}

up_bookkeeper() {
  local folder=$RUN/bk classes="$HOME_DIR/bk/lib/*" spark
  spark=$("$PYTHON" -c 'import importlib.util as u; print(u.find_spec("pyspark").submodule_search_locations[0])')
  mkdir -p "$folder/zk"
  printf 'dataDir=%s\nclientPort=2182\nclientPortAddress=127.0.0.1\nadmin.enableServer=false\n' \
    "$folder/zk" > "$folder/zoo.cfg"
  start "$folder/zk.log" java -Xmx256m -cp "$classes:$spark/jars/*" \
    org.apache.zookeeper.server.ZooKeeperServerMain "$folder/zoo.cfg"
  wait_for_port 2182 30
  for i in 1 2 3; do
    mkdir -p "$folder/j$i" "$folder/l$i"
    bookie_conf "$i" "$folder" > "$folder/b$i.conf"
  done
  java -cp "$classes" org.apache.bookkeeper.bookie.BookieShell -conf "$folder/b1.conf" \
    metaformat -nonInteractive -force > "$folder/format.log" 2>&1
  for i in 1 2 3; do
    start "$folder/b$i.log" java -Xms256m -Xmx512m -XX:MaxDirectMemorySize=768m -cp "$classes" \
      org.apache.bookkeeper.server.Main --conf "$folder/b$i.conf"
  done
  for i in 1 2 3; do wait_for_port $((3280 + i)) 60; done
}

up_pulsar() { # up_pulsar [PORT [SYNC]]
  local port=${1:-6650} sync=${2:-true} folder=$RUN/pulsar opens=() name
  local web=$((port + 1430))
  mkdir -p "$folder"
  for name in sun.net java.lang jdk.internal.misc jdk.internal.platform java.nio; do
    opens+=(--add-opens "java.base/$name=ALL-UNNAMED")
  done
  printf '%s\n' zookeeperServers= metadataStoreUrl= configurationMetadataStoreUrl= \
    brokerServicePort=$port webServicePort=$web bindAddress=127.0.0.1 advertisedAddress=127.0.0.1 \
    clusterName=standalone managedLedgerDefaultEnsembleSize=1 managedLedgerDefaultWriteQuorum=1 \
    managedLedgerDefaultAckQuorum=1 journalSyncData=$sync nettyMaxFrameSizeBytes=5253120 allowLoopback=true diskUsageThreshold=0.99 \
    diskUsageWarnThreshold=0.98 > "$folder/standalone.conf"
  cd "$folder"
  start "$folder/pulsar.log" java -Xmx1g -XX:MaxDirectMemorySize=1g "${opens[@]}" \
    -Dio.netty.tryReflectionSetAccessible=true -cp "$HOME_DIR/pulsar/lib/*" \
    org.apache.pulsar.PulsarStandaloneStarter --config standalone.conf -nss -nfw \
    --metadata-dir ./meta --bookkeeper-dir ./bk
  wait_for_port "$port" 90
  wait_for_port "$web" 90
}

bk_bench() {
  local log=$RUN/bk-bench.log
  cd "$RUN" # it leaves files where it is started
  timeout 90 java -Xmx1500m -cp "$HOME_DIR/bk/lib/*" \
    org.apache.bookkeeper.benchmark.BenchThroughputLatency -ensemble 3 -quorum 3 -ackQuorum 2 \
    -entrysize "$1" -throttle "$2" -time 12 -skipwarmup -zookeeper 127.0.0.1:2182 -ledgers 1 \
    > "$log" 2>&1 || true
  grep -aE "completions in|percentile latency" "$log" | sed 's/.*- //'
}

down() {
  if [ -f "$RUN/pids" ]; then
    while read -r pid; do kill "$pid" 2> /dev/null || true; done < "$RUN/pids"
    sleep 3
    while read -r pid; do kill -9 "$pid" 2> /dev/null || true; done < "$RUN/pids"
  fi
  rm -rf "$RUN"
}

case "${1:-} ${2:-}" in
  "install ") for peer in kafka bk pulsar spark-kafka; do fetch "$peer"; done ;;
  "install "*) for peer in "${@:2}"; do fetch "$peer"; done ;;
  "spark-kafka-jars "*) ls "$HOME_DIR"/spark-kafka/lib/{spark,kafka,commons}*.jar | paste -sd, ;;
  "bk-bench "*) bk_bench "$2" "$3" ;;
  "down "*) down ;;
  "up kafka") up_kafka "${3:-3}" ;;
  "up bookkeeper") up_bookkeeper ;;
  "up pulsar") up_pulsar "${@:3}" ;;
  *) sed -n 2,11p "$0"; exit 2 ;;
esac
