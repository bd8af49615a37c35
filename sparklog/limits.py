"""Every bound in one place. A setting that a user may change has its default here too."""

from __future__ import annotations

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

FORMAT_VERSION = 1

# ---- names and records
TOPIC_NAME_LENGTH = 249
PARTITIONS_PER_TOPIC = 10_000
DEFAULT_PARTITIONS = 4
MAX_RECORD_BYTES = 16 * MIB
MAX_BATCH_BYTES = 64 * MIB
MAX_BATCH_ROWS = 1_000_000
ROW_BYTES = 32  # of a row in memory beside its record: offset, partition, types, validity
LARGE_BYTES = 4 * MIB  # from this size on, what is decoded waits for its turn
DECODE_BYTES = 96 * MIB  # of large batches that are decoded at a time, at the door and for readers
COMPRESSION_EXPECTED = 16  # where nobody has said how large compressed records are
TIMESTAMP_MIN_US = -62_135_596_800_000_000  # 0001-01-01, the first day of Spark's TIMESTAMP
TIMESTAMP_MAX_US = 253_402_300_799_999_999  # 9999-12-31, its last

# ---- broker: writing
FLUSH_MAX_BYTES = 16 * MIB
FLUSH_MAX_ENTRIES = 4_096
FLUSH_LINGER_REMOTE_MS = 10
QUEUE_BYTES = 64 * MIB
HOT_TAIL_BYTES = 192 * MIB
UNPUBLISHED_BYTES = 8 * GIB
STAGED_BYTES = 64 * GIB
TOPIC_HELD_BYTES = 1 * GIB
TOPIC_HELD_STAGED_BYTES = 8 * GIB
FREE_SPACE_RESERVE_BYTES = 256 * MIB
CHECKPOINT_EVERY_OBJECTS = 1_000
CHECKPOINT_EVERY_SECONDS = 10.0
TRIM_GRACE_SECONDS = 10.0  # at least, and readers look again within it
CARRY_AFTER_SECONDS = 300.0
RETRY_MAX_SECONDS = 10.0  # between attempts at what has failed many times
UNCONFIRMED_ENTRIES = 50_000  # that are published, and are kept until their files were seen

# ---- broker: publishing
PUBLISH_INTERVAL_SECONDS = 1.0
PUBLISH_BYTES = 32 * MIB
PUBLISH_MAX_BYTES = 128 * MIB
PUBLISH_MAX_ENTRIES = 65_536  # of a partition, in one commit
PUBLISH_FILE_BYTES = 64 * MIB
PUBLISH_THREADS = 2
PUBLISH_THREADS_REMOTE = 8
PUBLISH_IN_PARALLEL_BYTES = 4 * MIB
PUBLISH_TOGETHER_BYTES = 1 * MIB  # of Kafka's batches, that are decoded at once
PUBLISH_QUIET_SECONDS = 0.25
PUBLISH_PRESSED_BYTES = 3 * GIB
ROW_GROUP_ROWS = 65_536
ROW_GROUP_BYTES = 32 * MIB  # as rows stand in memory
FILE_BATCH_BYTES = 8 * MIB  # of rows that are read from a file at a time; Arrow takes six times it

# ---- broker: being alive
HEARTBEAT_SECONDS = 1.0
DEAD_AFTER_SECONDS = 5.0
META_VERSIONS_KEPT = 100
PRODUCER_EXPIRY_SECONDS = 24 * 3600.0
BATCH_MEMORY_SECONDS = 30 * 24 * 3600.0
PRODUCER_WINDOW = 5
PRODUCER_IDS_TAKEN = 1_000  # in one version of the metadata, as Kafka has it
PRODUCERS_PER_PARTITION = 20_000  # that are remembered; the longest silent are forgotten first
PRODUCERS_IN_ALL = 100_000  # the same of all partitions together: ~1 kB each
PRODUCERS_PER_BLOCK = 256  # of neighbouring ids, that a checkpoint encodes together
PRODUCERS_FORGOTTEN = 2_000  # of those that have expired, with each checkpoint
PRODUCER_REFUSAL_SECONDS = 120.0  # Kafka's delivery.timeout.ms: so long a refused batch may come
PRODUCER_REFUSALS = 10_000  # such batches that are remembered
BATCHES_REMEMBERED = 16  # of a query, with the offsets where they are
QUERIES_REMEMBERED = 1_000  # of a partition, in the same way
SINGLES_REMEMBERED = 256  # writes of a partition that are no query's, and published
SINGLE_MEMORY_SECONDS = 3600.0  # a driver asks again within a minute
KEYS_REMEMBERED = 50_000  # idempotency keys of a topic
ADOPTED_WITHIN_SECONDS = BATCH_MEMORY_SECONDS - 24 * 3600.0  # a write that is not numbered
BATCHES_FORGOTTEN = 1_000  # at a time
EMBEDDED_BROKER_ID = 1_000_000
DETACHED_IDLE_SECONDS = 60.0
STOP_SECONDS = 30.0
STATUS_TOPICS = 1_000  # that are held back, in one answer
LOG_FILE_BYTES = 10 * MIB  # of a log file, before the next one begins
LOG_FILES_KEPT = 3  # of the older ones

# ---- keeping
JANITOR_INTERVAL_SECONDS = 1.0
TABLE_CHECKPOINT_EVERY = 100
TABLE_CHECKPOINTS_KEPT = 2
TABLE_COMMIT_ATTEMPTS = 100
TABLE_LOAD_ATTEMPTS = 5
TABLE_LOG_KEPT_SECONDS = 24 * 3600.0
TABLE_LOG_KEPT_VERSIONS = 1_000
TOMBSTONE_SECONDS = 3600.0  # beyond the removed file's grace
ORPHAN_GRACE_SECONDS = 3600.0
REMOVED_FILE_GRACE_SECONDS = 600.0
COMPACT_FILES = 16
COMPACT_TARGET_BYTES = 128 * MIB
BUSY_BYTES_PER_SECOND = 48 * MIB
FILES_BEFORE_PATIENCE_ENDS = 2_000
COMPACT_SETTLED_SECONDS = 3600.0
COMPACT_KEYS_BYTES = 256 * MIB  # of memory, for the keys that are compared at a time
COMPACT_KEYS_ROWS = 1_048_576  # that wait to be compared
COMPACT_STEP_BYTES = 1 * GIB  # of files that one commit of a key compaction replaces
MIN_CLEANABLE_DIRTY_RATIO = 0.5
MIN_COMPACTION_LAG_MS = 0
DELETE_RETENTION_MS = 24 * 3600 * 1_000
MILLISECONDS_MAX = 2**63 - 1  # an int64, as Kafka has it
STAGING_ABANDONED_SECONDS = 7 * 24 * 3600.0
SWEEP_EVERY_SECONDS = 300.0
FILES_ASKED_FOR = 8  # one by one, whether they are there; a listing tells of more
SETTLE_EVERY_SECONDS = 60.0
UPKEEP_RETRY_SECONDS = 30.0
RETENTION_EVERY_SECONDS = 60.0  # Kafka's log.retention.check.interval.ms is 5 minutes
RETENTION_SPANS = 10  # of `retention.ms`, one for each file: by so little may a record outstay it
FILES_BEFORE_SPANS_END = 200  # of a partition; then records may outstay it by more
DELETE_ATTEMPTS = 5  # where others rewrite the files that hold what is deleted
TEMPORARY_KEPT_SECONDS = 3600.0  # no put takes so long

# ---- broker: the Flight door
FLIGHT_STREAMS = 512  # of all clients; each takes a thread
FLIGHT_WAITING_ACTIONS = 512  # that wait for something to happen, likewise
FLIGHT_HELD_BYTES = 256 * MIB  # of rows that clients have asked for and do not read
FLIGHT_WINDOW_BYTES = 64 * MIB  # that gRPC may read ahead of what is taken from it
FLIGHT_MESSAGE_BYTES = 2 * MAX_BATCH_BYTES + FLIGHT_WINDOW_BYTES  # received, and no whole message
FLIGHT_IDLE_SECONDS = 600.0  # for which a stream may wait for its client
FLIGHT_IDLE_SHORT_SECONDS = 5.0  # the same while streams or memory are short
FLIGHT_PRESSED_SECONDS = 5.0  # streams are short for so long after one was refused
FLIGHT_LOOK_SECONDS = 0.05  # between two looks at what connections have received

# ---- broker: the Kafka door
KAFKA_REQUEST_MAX_BYTES = 100 * MIB  # Kafka's socket.request.max.bytes
KAFKA_PIPELINED = 16  # answers of a connection that may wait while it is read on
KAFKA_CONNECTIONS = 4_000
KAFKA_CONNECTIONS_PER_ADDRESS = 1_000
KAFKA_OTHER_FILES = 1_024  # that the process may have open beside connections
KAFKA_CONTROL_THREADS = 4  # of each pool: who waits in one of them holds up nobody in another
KAFKA_CHANGE_THREADS = 2
KAFKA_CHECK_THREADS = 2
KAFKA_READ_THREADS = 8
KAFKA_WAIT_SECONDS = 600.0  # for which a client may have a request wait at most
KAFKA_MEMORY_BYTES = 512 * MIB  # of requests and replies, of all connections
KAFKA_CONNECTION_BYTES = 32 * MIB  # of one's requests; a single larger one has its turn alone
KAFKA_READ_BYTES = 32 * KIB  # of a connection, before they are wanted
KAFKA_FREE_BYTES = 16 * KIB  # of a connection's requests and replies, which are not counted
KAFKA_STEP_BYTES = 64 * KIB  # of a request that arrives; then as much as has come already
KAFKA_REPLY_BYTES = 32 * MIB  # of one reply, but for records
KAFKA_QUICK_BYTES = 32 * KIB  # of a compressed batch that is checked where requests are read
KAFKA_QUICK_RECORDS_BYTES = 256 * KIB  # the same out of compression; others take another thread
KAFKA_ITEMS = 200_000  # of all arrays of a request: topics, partitions, members, …
KAFKA_ITEM_BYTES = 320  # that one of them takes in memory, taken apart
KAFKA_QUICK_ITEMS = 2_000  # so many are taken apart where requests are read
KAFKA_QUICK_REPLY_ITEMS = 256  # and so many are written there in one go
KAFKA_TURN_SECONDS = 0.003  # for which one request keeps the loop from the others
KAFKA_CREATED_TOPICS = 16  # that one Metadata request creates; others when it is asked again
KAFKA_BATCH_BYTES = 256 * KIB  # of one that is made of rows; a larger record goes alone
KAFKA_MADE_BYTES = 1 * MIB  # of such batches that are made at a time, however few are asked for
KAFKA_AHEAD_BYTES = 128 * MIB  # of such batches that are kept for who reads on
KAFKA_PORTION_BATCHES = 512  # that are read in one go, as they came
KAFKA_FEW_BATCHES = 32  # so many go out as they lie, however small they are
KAFKA_SMALL_PIECE_BYTES = 1 * KIB  # smaller pieces of batches are joined; a batch has two
KAFKA_FETCH_BYTES = 8 * MIB  # of records in one reply; a larger batch goes alone
KAFKA_STALLED_SECONDS = 30  # for which a client may leave its answers unread
KAFKA_STALLED_SHORT_SECONDS = 1  # the same while others wait for memory
KAFKA_SLOWEST_BYTES_PER_SECOND = 1 * MIB  # at which a large request has to come
KAFKA_IDLE_SECONDS = 600  # Kafka's connections.max.idle.ms
KAFKA_FETCH_SESSIONS = 1_000  # Kafka's max.incremental.fetch.session.cache.slots
KAFKA_FETCH_SESSION_PARTITIONS = 100_000  # of all sessions together
KAFKA_FETCH_SESSION_KEPT_SECONDS = 120.0  # and how long one is safe there
KAFKA_RECORD_ERRORS = 1_000  # of the records that a batch is refused for, so many are named

# ---- broker: consumer groups; what may be set is as Kafka has it
MIN_SESSION_TIMEOUT_MS = 6_000
MAX_SESSION_TIMEOUT_MS = 30 * 60_000
INITIAL_REBALANCE_DELAY_MS = 0  # Kafka has 3 s, and 0 as it is shipped for development
GROUP_SIZE = 2**31 - 1
NEW_MEMBER_JOIN_TIMEOUT_MS = 5 * 60_000  # waits so long that has never been in a generation
OFFSETS_PARTITIONS = 8  # of `__consumer_offsets`
OFFSETS_RETENTION_MINUTES = 7 * 24 * 60
OFFSETS_RETENTION_CHECK_SECONDS = 600.0
OFFSET_METADATA_LENGTH = 4_096  # in characters of UTF-16, as Kafka's offset.metadata.max.bytes
GROUP_OFFSETS_STEP = 2_000  # that are looked at under the coordinator's lock at a time
GROUPS_STEP = 256  # the same of groups

# ---- storage
CLAIM_ATTEMPTS = 8
CLAIM_BACKOFF_SECONDS = 0.1  # doubled after each attempt
CLAIM_BACKOFF_MAX_SECONDS = 2.0
DIRECT_WRITE_BYTES = 1 * MIB  # from this size on, past the page cache
DIRECT_BUFFER_BYTES = 4 * MIB
DIRECT_BUFFERS_KEPT = 4
LOCAL_PUT_ATTEMPTS = 3  # where the folder is removed behind us
LOCAL_FOLDERS_REMEMBERED = 4_096
REMOTE_RETRIES = 10
REMOTE_RETRY_SECONDS = 10.0
RANGE_READ_BYTES = 256 * KIB
SORT_MEMORY_BYTES = 64 * MIB  # of rows in no order that wait in memory; others wait on disk
SORT_OFFSETS_ROWS = 1_048_576  # of a file whose offsets are looked over at a time
SORT_FIRST_ROWS = 65_536  # offsets that are put in order first where not all may be wanted
SORT_GROWS = 4  # and by what factor more of them each time
SORT_FILES_BYTES = 16 * GIB  # of another engine's files that the janitor puts in order at once
FOREIGN_GROUP_BYTES = 256 * MIB  # of a row group of another engine that is not cut
FILES_OPEN = 64  # that are read at the same time
BUFFERED_GROUP_BYTES = 32 * MIB  # of a row group's column that is not read into memory at once
BUFFER_BYTES = 1 * MIB
BUFFER_REMOTE_BYTES = 8 * MIB
READ_RUN_BYTES = 16 * MIB  # of neighbours in the log that are read as one batch, decoded

# ---- Spark
STAGED_SECTION_ROWS = 131_072
STAGED_SECTION_BYTES = 32 * MIB
STAGED_FILE_BYTES = 64 * MIB
TASK_MIN_BYTES = 4 * MIB
TASK_MAX_BYTES = 512 * MIB
TASKS_PER_CORE = 2
STREAM_WAIT_MIN_SECONDS = 0.002
STREAM_WAIT_MAX_SECONDS = 0.2
STREAM_LOOK_SECONDS = 0.1
POLL_INTERVAL_REMOTE_SECONDS = 0.5
POLL_BLOCKS_SECONDS = 1.0
MAX_TRIGGER_DELAY_SECONDS = 15 * 60.0
SPARK_PATIENCE_SECONDS = 60.0
GROUP_REPORT_SECONDS = 1.0  # so often at most a stream tells a group where it is
GROUP_REPORT_RETRY_SECONDS = 10.0  # after an attempt that failed
GROUP_REPORT_AGAIN_SECONDS = 3600.0  # also what has not changed, because offsets expire
GROUP_REPORT_TIMEOUT_SECONDS = 10.0  # of one attempt
GROUP_REPORT_LAST_SECONDS = 5.0  # that the end of a query waits for its last
REPLAN_ATTEMPTS = 5

# ---- clients
PRODUCER_BUFFER_BYTES = 64 * MIB
PRODUCER_LINGER_MS = 5
PRODUCER_BATCH_ROWS = 10_000
PRODUCER_BATCH_BYTES = 1 * MIB
DELIVERY_TIMEOUT_SECONDS = 120.0
MAX_BLOCK_SECONDS = 60.0
TABLE_BATCH_ROWS = 65_536
TABLE_BATCH_BYTES = 4 * MIB
STREAM_IDLE_SECONDS = 30.0
SCAN_BATCH_ROWS = 65_536
CONSUMER_BUFFER_BYTES = 32 * MIB
CONSUMER_POLL_ROWS = 1_000
READ_THREADS = 4
SESSION_TIMEOUT_SECONDS = 45.0  # of a member of a group, as Kafka's consumers have it
GROUP_HEARTBEAT_SECONDS = 3.0
MAX_POLL_INTERVAL_SECONDS = 300.0
AUTO_COMMIT_SECONDS = 5.0
GROUP_ANSWER_SECONDS = 30.0  # beyond the time that members have to join
GROUP_CLOSE_SECONDS = 5.0  # for the last commit, and again for leaving
METADATA_AGE_SECONDS = 30.0
ACTION_TIMEOUT_SECONDS = 30.0
PROBE_TIMEOUT_SECONDS = 3.0
KEEPALIVE_SECONDS = 10.0
KEEPALIVE_TIMEOUT_SECONDS = 5.0
BACKOFF_FIRST_SECONDS = 0.02
BACKOFF_MAX_SECONDS = 1.0

# ---- settings: the widest values that a broker starts with
INT32_MAX = 2**31 - 1
BROKER_ID_MAX = INT32_MAX  # as Kafka's wire has it
LINGER_MAX_MS = 60_000
BUFFER_MAX_BYTES = 1 * GIB  # half of what an Arrow binary column's int32 offsets reach
SPACE_MAX_BYTES = 1024 * GIB
INTERVAL_MAX_SECONDS = 24 * 3600
GRACE_MAX_SECONDS = 366 * 24 * 3600
COUNT_MAX = 1_000_000
