"""Bounds and defaults shared by several modules. Others are in the module that they bound."""

from __future__ import annotations

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

FORMAT_VERSION = 6  # the newest that this release reads
GROUP_CONFIGS_LEVEL = 2  # feature level from which groups have configurations
LISTENERS_LEVEL = 2  # feature level from which members register several listeners
TOKEN_SECONDS = 24 * 3_600  # the lifetime of a token for the tasks of a job
TOKEN_TOPIC_CHARACTERS = 2_000  # of the topics in such a token, which has to fit into a header
SECURITY_LEVEL = 3  # feature level from which a root can have users
SCHEMAS_AT_ONCE = 100  # schemas of a registry in one request
TYPED_LEVEL = 4  # feature level from which tables have typed columns
LEVEL = 4  # the highest feature level that this release supports; it supports all lower ones too

# ---- names and records
PARTITIONS_PER_TOPIC = 10_000
TOPICS_CREATED_TOGETHER = 64  # in one version of the metadata
MAX_RECORD_BYTES = 16 * MIB
MAX_BATCH_BYTES = 64 * MIB
MAX_BATCH_ROWS = 1_000_000
ROW_BYTES = 32  # memory of a row in addition to its record: offset, partition, types, validity
LARGE_BYTES = 4 * MIB  # larger batches take turns to be decoded
DECODE_BYTES = 96 * MIB  # of large batches decoded concurrently, for listeners and readers
TIMESTAMP_MIN_US = -62_135_596_800_000_000  # 0001-01-01, the first day of Spark's TIMESTAMP
TIMESTAMP_MAX_US = 253_402_300_799_999_999  # 9999-12-31, its last

# ---- broker: writing
FLUSH_MAX_BYTES = 16 * MIB
FLUSH_MAX_ENTRIES = 4_096
QUEUE_BYTES = 64 * MIB
UNPUBLISHED_BYTES = 8 * GIB
STAGED_BYTES = 64 * GIB
FREE_SPACE_RESERVE_BYTES = 256 * MIB
FEW_INODES = 1_000  # not 0: files left by rejected puts are removed before free inodes are counted
CHECKPOINT_EVERY_SECONDS = 10.0
CONFIRM_AFTER_SECONDS = 10.0  # from its commit until a file is checked and the WAL drops its rows
TRIM_GRACE_SECONDS = 10.0  # the minimum; readers retry within it
UNCONFIRMED_ENTRIES = 50_000  # published entries that are retained until their files are seen

# ---- broker: publishing
PUBLISH_INTERVAL_SECONDS = 1.0
PUBLISH_BYTES = 32 * MIB  # unpublished, of a topic that is then published at once
PUBLISH_HELD_LOG_BYTES = 1 * GIB  # of the log, retained for topics with a long interval
PUBLISH_MAX_BYTES = 128 * MIB
PUBLISH_FILE_BYTES = 64 * MIB
PUBLISH_PARTITIONS_TOGETHER = 512  # of a topic; one with more takes several turns
PUBLISH_LIGHT_BYTES = 4 * MIB  # of a topic's turn that is published together with others
PUBLISH_SMALL_BYTES = 128 * KIB  # of the rows of a file that is put in a batch with others
PUBLISH_ENCODED_BYTES = 32 * MIB  # of encoded files that wait to be put in a batch
PUBLISH_SHARE = 0.25  # of the time that publishing may take before its interval stretches
PUBLISH_STRETCH = 4.0  # the maximum factor by which the interval stretches
ROW_GROUP_ROWS = 65_536
ROW_GROUP_BYTES = 32 * MIB  # of rows in memory; also a bound wherever row groups are read
SMALL_FILE_BYTES = 256 * KIB  # of a data file that is always read whole, in one request

# ---- broker: liveness
DEAD_AFTER_SECONDS = 5.0
WATCH_SECONDS = 0.1  # between two checks for other members and of their state, on a local disk
PREPARE_SECONDS = 0.5  # for others to read the log of a broker about to hand over partitions
DRAIN_SECONDS = 10.0  # to hand over partitions to other members before a stop
BATCH_MEMORY_SECONDS = 30 * 24 * 3600.0
PRODUCER_WINDOW = 5  # batches recognised per producer and partition, as in Kafka
KEYS_REMEMBERED = 50_000  # idempotency keys of a topic
STOP_SECONDS = 30.0
STATUS_TOPICS = 1_000  # held-back topics in one reply
STATUS_PARTITIONS = 1_000  # partitions without a live leader in one reply

# ---- upkeep of tables
TABLE_CHECKPOINT_EVERY = 100
REPLACED_KEPT_SECONDS = 3600.0  # during which no VACUUM removes files that a merge has replaced
ORPHAN_GRACE_SECONDS = 3600.0
REMOVED_FILE_GRACE_SECONDS = 600.0
COMPACT_FILES = 16
COMPACT_TARGET_BYTES = 128 * MIB
MIN_CLEANABLE_DIRTY_RATIO = 0.5
MIN_COMPACTION_LAG_MS = 0
DELETE_RETENTION_MS = 24 * 3600 * 1_000
OFFSET_MAX = 2**63 - 2**53  # maximum end of a mirror; leaves int64 offsets for records after it

# ---- broker: listeners
LISTEN_BACKLOG = 1_024  # connections waiting to be accepted; the system may allow fewer

# ---- broker: the Flight listener
FLIGHT_CONNECTION_CALLS = 512  # of one connection, including those whose threads still run
FLIGHT_STREAMS = 512  # of all clients; each takes a thread, except tails
FLIGHT_WAITING_ACTIONS = 512  # that wait for an event; each takes a thread
FLIGHT_FREE_ROWS_BYTES = 256 * KIB  # of rows in each stream that need no grant
FLIGHT_IDLE_SECONDS = 600.0  # that a stream waits for its client
FLIGHT_IDLE_SHORT_SECONDS = 5.0  # while streams or memory are scarce

# ---- broker: the Kafka listener
KAFKA_CONNECTIONS = 4_000
KAFKA_CONNECTIONS_PER_ADDRESS = 1_000
KAFKA_WAIT_SECONDS = 600.0  # the longest wait that a request may ask for
KAFKA_FREE_BYTES = 16 * KIB  # of a connection's requests and replies that are not counted
KAFKA_ITEMS = 200_000  # in all arrays of a request: topics, partitions, members, …
KAFKA_QUICK_ITEMS = 2_000  # are decoded immediately on the event loop
KAFKA_LITTLE_ITEMS = 8  # of a request or reply; larger ones take turns on the event loop
KAFKA_SHORT_RECORDS_BYTES = 256 * KIB  # replies up to this size have their own memory

# ---- broker: the HTTP port for metrics
LAG_POSITIONS = 10_000  # of groups, in one request to the leader of their partitions
FIGURES_TOPICS = 2_000  # in an answer for `sparklog top`; those with the most records
FIGURES_GROUPS = 2_000

# ---- broker: consumer groups; settings have Kafka's meaning
GROUPS_RESERVED_BYTES = 16 * MIB  # of member ids that were assigned but have not joined yet
OFFSETS_PARTITIONS = 8  # of `__consumer_offsets`
GROUP_OFFSETS_STEP = 2_000  # offsets visited at a time under the coordinator's lock

# ---- storage
DIRECT_WRITE_BYTES = 1 * MIB  # larger files bypass the page cache
DIRECT_BUFFER_BYTES = 4 * MIB
STORE_REQUESTS_AT_ONCE = 32  # to an object store, per caller
TABLE_REQUESTS_AT_ONCE = 4  # per table, because many tables are read concurrently
READ_RUN_BYTES = 16 * MIB  # of adjacent entries, decoded, that are read as one batch

# ---- Spark
POLL_INTERVAL_REMOTE_SECONDS = 0.5
SPARK_PATIENCE_SECONDS = 60.0
REPLAN_ATTEMPTS = 5

# ---- clients
PRODUCER_BUFFER_BYTES = 64 * MIB
PRODUCER_LINGER_MS = 5
PRODUCER_BATCH_ROWS = 10_000
PRODUCER_BATCH_BYTES = 1 * MIB
DELIVERY_TIMEOUT_SECONDS = 120.0
MAX_BLOCK_SECONDS = 60.0
TABLE_BATCH_ROWS = 65_536
SCAN_BATCH_ROWS = 65_536
CONSUMER_BUFFER_BYTES = 32 * MIB
CONSUMER_POLL_ROWS = 1_000
READ_THREADS = 4
SESSION_TIMEOUT_SECONDS = 45.0  # of a member of a group, as in Kafka's consumers
GROUP_HEARTBEAT_SECONDS = 3.0
MAX_POLL_INTERVAL_SECONDS = 300.0
AUTO_COMMIT_SECONDS = 5.0
GROUP_CLOSE_SECONDS = 5.0  # for the last commit, and again for leaving
METADATA_AGE_SECONDS = 30.0
ACTION_TIMEOUT_SECONDS = 30.0
PROBE_TIMEOUT_SECONDS = 3.0
KEEPALIVE_SECONDS = 10.0
KEEPALIVE_TIMEOUT_SECONDS = 5.0
BACKOFF_MAX_SECONDS = 1.0

# ---- settings: bounds of valid values
INT32_MAX = 2**31 - 1
BROKER_ID_MAX = INT32_MAX  # as in Kafka's protocol
BUFFER_MAX_BYTES = 1 * GIB  # half the range of the int32 offsets of an Arrow binary column
