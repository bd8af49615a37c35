"""All bounds of sparklog, and the defaults of its settings."""

from __future__ import annotations

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

FORMAT_VERSION = 3  # the newest that this release reads
LEVEL = 1  # the highest feature level that this release knows; it knows all below it

# ---- names and records
TOPIC_NAME_LENGTH = 249
PARTITIONS_PER_TOPIC = 10_000
DEFAULT_PARTITIONS = 4
TOPICS_CREATED_TOGETHER = 64  # by one version of the metadata
MAX_RECORD_BYTES = 16 * MIB
MAX_BATCH_BYTES = 64 * MIB
MAX_BATCH_ROWS = 1_000_000
ROW_BYTES = 32  # memory of a row beside its record: offset, partition, types, validity
LARGE_BYTES = 4 * MIB  # larger batches are decoded in turn
DECODE_BYTES = 96 * MIB  # of large batches that are decoded at a time, for listeners and readers
COMPRESSION_EXPECTED = 16  # the ratio if the size of decompressed records is unknown
TIMESTAMP_MIN_US = -62_135_596_800_000_000  # 0001-01-01, the first day of Spark's TIMESTAMP
TIMESTAMP_MAX_US = 253_402_300_799_999_999  # 9999-12-31, its last

# ---- broker: writing
FLUSH_MAX_BYTES = 16 * MIB
FLUSH_MAX_ENTRIES = 4_096
FLUSH_LINGER_REMOTE_MS = 10
FLUSHES_AT_ONCE_REMOTE = 4  # puts of the log that are under way at the same time
FLUSHES_AT_ONCE_MAX = 8  # objects that a broker of any release may have put from its fence on
FLUSH_INTERVAL_REMOTE_SECONDS = 0.01  # between two puts under way: 8.6 million a day at most
QUICK_FLUSH_BYTES = 64 * KIB  # of a flush that the Kafka listener's event loop leads itself,
QUICK_FLUSH_SECONDS = 0.000_5  # if recent flushes took less than this on average,
SLOW_FLUSH_SECONDS = 0.005  # and none of them took longer than this
SLOW_FLUSH_PAUSE_SECONDS = 1.0  # within the time before it
QUEUE_BYTES = 64 * MIB
HOT_TAIL_BYTES = 192 * MIB
IDLE_HEAP_BYTES = 64 * MIB  # of freed memory; more is returned to the system
IDLE_HEAP_SECONDS = 10.0  # that it is unused before
GC_FULL_EVERY = 100  # garbage collections of young objects; Python's default is 10
UNPUBLISHED_BYTES = 8 * GIB
STAGED_BYTES = 64 * GIB
TOPIC_HELD_BYTES = 1 * GIB
TOPIC_HELD_STAGED_BYTES = 8 * GIB
FREE_SPACE_RESERVE_BYTES = 256 * MIB
FREE_SPACE_SECONDS = 0.1  # between two looks at the free space while twice the reserve is free
CHECKPOINT_EVERY_OBJECTS = 1_000
CHECKPOINT_EVERY_SECONDS = 10.0
SEGMENT_BYTES = 64 * MIB  # of the write-ahead log of a local root; also between two checkpoints
SEGMENT_ALLOCATED_BYTES = 4 * MIB  # that are reserved at a time ahead of the log's end
FENCE_ATTEMPTS = 100  # while a living broker ends its segments
CONFIRM_AFTER_SECONDS = 10.0  # after its commit a file is checked, and the WAL drops its rows
TRIM_GRACE_SECONDS = 10.0  # the minimum; readers look again within it
CARRY_AFTER_SECONDS = 300.0
RETRY_MAX_SECONDS = 10.0  # between attempts after repeated failures
UNCONFIRMED_ENTRIES = 50_000  # published entries that are kept until their files are seen

# ---- broker: publishing
PUBLISH_INTERVAL_SECONDS = 1.0
PUBLISH_BYTES = 32 * MIB
PUBLISH_MAX_BYTES = 128 * MIB
PUBLISH_MAX_ENTRIES = 65_536  # of a partition, in one commit
PUBLISH_FILE_BYTES = 64 * MIB
PUBLISH_TOPICS_TOGETHER = 64  # that are published together
PUBLISH_PARTITIONS_TOGETHER = 512  # of these topics; one with more has several turns
PUBLISH_LIGHT_BYTES = 4 * MIB  # of a topic's turn that is published with others
PUBLISH_SMALL_BYTES = 128 * KIB  # of the rows of a file that is put together with others
PUBLISH_ENCODED_BYTES = 32 * MIB  # of encoded files that wait to be put together
PUBLISH_BESIDE = 2  # topics that are published beside the others, because they have much
PUBLISH_BESIDE_REMOTE = 8
PUBLISH_SHARE = 0.25  # of the time that publishing may take before its interval stretches
PUBLISH_SHARE_REMOTE = 1.0  # waiting for a store takes no processor from producers
PUBLISH_SHARE_PROCESS = 0.5  # the same, by a process of its own, which shares only the disk
PUBLISH_STRETCH = 4.0  # the factor by which the interval stretches at most
PUBLISH_PROCESS_OBJECTS = 160  # files and commits that wait, from which on a process is started
PUBLISH_PROCESS_PARTITIONS = 1_000  # of a broker, from which on it has a process before they wait
PUBLISH_PROCESS_AFTER_SECONDS = 5.0  # for which it has so many of either, before it is started
PUBLISH_PROCESS_START_SECONDS = 60.0
PUBLISH_PROCESS_SECONDS = 20.0  # for one request
PUBLISH_PROCESS_RUNS = 512  # that one request writes; each is a file or more
PUBLISH_PROCESS_BYTES = 16 * MIB  # of Kafka's batches in one request; others are read by it
PUBLISH_PROCESS_END_SECONDS = 1.0  # in which it may end by itself, before it is killed
PUBLISH_PROCESS_STDERR_BYTES = 64 * KIB  # the last ones are logged; a pipe has as many
PUBLISH_PROCESS_RETRY_SECONDS = 600.0  # the longest pause before another process is started
PUBLISH_PROCESS_STEADY_SECONDS = 60.0  # after which a lost process counts as the first one
PUBLISH_THREADS = 2
PUBLISH_THREADS_REMOTE = 8
PUBLISH_IN_PARALLEL_BYTES = 4 * MIB
PUBLISH_TOGETHER_BYTES = 1 * MIB  # of Kafka's batches that are decoded together
PUBLISH_QUIET_SECONDS = 0.25
PUBLISH_PRESSED_BYTES = 3 * GIB
ROW_GROUP_ROWS = 65_536
ROW_GROUP_BYTES = 32 * MIB  # of rows in memory; also a bound wherever row groups are read
SMALL_FILE_BYTES = 256 * KIB  # of a data file that is read by one request, whatever is wanted of it
FILE_BATCH_BYTES = 8 * MIB  # of rows that are read from a file at a time; Arrow uses 6 × as much

# ---- broker: being alive
HEARTBEAT_SECONDS = 1.0
HEARTBEAT_REMOTE_SECONDS = 2.0
DEAD_AFTER_SECONDS = 5.0
DEAD_AFTER_REMOTE_SECONDS = 10.0
META_SNAPSHOT_EVERY = 20  # versions of the metadata; of a large cluster five times as many
META_LARGE_TOPICS = 1_000
FOLLOW_SECONDS = 0.02  # between two looks at the metadata, of a member that is not alone
FOLLOW_REMOTE_SECONDS = 1.0
WATCH_SECONDS = 0.1  # between two looks for other members, and at them, on a local disk
MOVE_WAIT_SECONDS = 0.25  # for which a request waits for a partition that is just moving
PREPARE_SECONDS = 0.5  # in which others read the log of a broker that is about to give partitions
HISTORY_ENTRIES = 100_000  # of other brokers' logs, which a member keeps to read them once
BALANCE_SECONDS = 30.0  # without a move, before members level their partitions again
STUCK_SECONDS = 60.0  # without success at taking partitions over, before they are passed on
UNFIT_SECONDS = 600.0  # after that, in which a broker gets no partitions
DRAIN_SECONDS = 10.0  # to give partitions to other members before a stop
REDIRECT_SECONDS = 1.0  # for which a broker that gave its partitions away still names their leaders
SUCCESSORS = 10  # brokers that share the partitions of one that has died
MOVES_AT_ONCE = 16  # partitions that a broker gives, or gets, in one pass of balancing
BALANCE_PLANNED = 5_000_000  # partitions that a plan looks at, in all of its passes together
UNEVEN_LEADERS = 2  # a difference in partitions that is not worth a move
META_KEPT_SECONDS = 600.0  # the minimum for a version of the metadata; above META_LOOK_SECONDS
META_LOOK_SECONDS = 30.0  # after this time without a look, the next one lists the versions
META_LIST_SECONDS = 60.0
PRODUCER_EXPIRY_SECONDS = 24 * 3600.0  # idle idempotent producers; checked at each WAL checkpoint
BATCH_MEMORY_SECONDS = 30 * 24 * 3600.0
PRODUCER_WINDOW = (
    5  # batches recognised for each producer and partition, as in Kafka; and in flight
)
PRODUCER_IDS_TAKEN = 1_000  # in one version of the metadata, as Kafka has it
PRODUCERS_PER_PARTITION = (
    20_000  # that are remembered; the least recently active ones are dropped first
)
PRODUCERS_IN_ALL = 100_000  # of all partitions together: ~1 kB each
PRODUCERS_PER_BLOCK = 256  # of neighbouring ids, that a checkpoint encodes together
PRODUCERS_FORGOTTEN = 2_000  # expired producers that a checkpoint drops at most
PRODUCER_REFUSAL_SECONDS = (
    120.0  # Kafka's delivery.timeout.ms: a refused batch may be repeated so long
)
PRODUCER_MOVE_SECONDS = 15.0  # after a partition has come, in which refused batches come again
PRODUCER_REFUSALS = 10_000  # refused batches that are remembered
LEADER_EPOCHS_REMEMBERED = 32  # of a partition, with their first offsets
BATCHES_REMEMBERED = 16  # of a query, with their offsets
QUERIES_REMEMBERED = 1_000  # of a partition
SINGLES_REMEMBERED = 256  # published writes of a partition outside queries
PARTS_REMEMBERED = 4_096  # of a partition, of writes outside queries to several leaders
PARTS_KEPT_SECONDS = 3600.0  # the staged files of several leaders, after all have appended them
SINGLE_MEMORY_SECONDS = 24 * 3600.0  # a driver repeats within a minute, unless it was suspended
KEYS_REMEMBERED = 50_000  # idempotency keys of a topic
APPEND_STAGED_SECONDS = BATCH_MEMORY_SECONDS - 24 * 3600.0  # a write with a key
SINGLE_APPEND_STAGED_SECONDS = SINGLE_MEMORY_SECONDS - 12 * 3600.0  # a write without a name
BATCHES_FORGOTTEN = 1_000  # dropped at a time
EMBEDDED_BROKER_ID = 1_000_000
DETACHED_IDLE_SECONDS = 60.0
STOP_SECONDS = 30.0
BROKER_PROCESSES = 64  # of `sparklog broker --processes`
PROCESS_STOP_SECONDS = 2 * (DRAIN_SECONDS + STOP_SECONDS)  # then brokers that run are killed
PROCESS_RETRY_SECONDS = 0.5  # before a process that ends again and again is started; then doubled
PROCESS_RETRY_MAX_SECONDS = 10.0
PROCESS_STEADY_SECONDS = 60.0  # that a broker has served, after which its end is the first again
STATUS_TOPICS = 1_000  # held-back topics in one reply
OVERVIEW_PAUSE_SECONDS = 0.25  # between two looks at the heartbeat of a member that may be dead
STATUS_PARTITIONS = 1_000  # partitions without a live leader in one reply
LOG_FILE_BYTES = 10 * MIB  # of a log file before the next one begins
LOG_FILES_KEPT = 3  # older log files

# ---- keeping
JANITOR_INTERVAL_SECONDS = 1.0
UPKEEP_SECONDS = 1.0  # after which a tick leaves the other topics to the next one
UPKEEP_ROUND_SECONDS = 60.0  # in which each topic has its turn
UPKEEP_QUIET_REMOTE_SECONDS = 20.0  # between two looks at a table to which nothing was committed
UPKEEP_TOPICS = 20  # that have their turn in each tick, if there are no more
UPKEEP_BESIDE = 1  # compactions by key that run beside the janitor
TABLE_CHECKPOINT_EVERY = 100
TABLE_CHECKPOINTS_KEPT = 2
TABLE_COMMIT_ATTEMPTS = 100
TABLE_LOAD_ATTEMPTS = 5
TABLE_LOG_KEPT_SECONDS = 24 * 3600.0
TABLE_LOG_KEPT_VERSIONS = 1_000
TOMBSTONE_SECONDS = 3600.0  # beyond the grace of removed files
REPLACED_KEPT_SECONDS = 3600.0  # that no VACUUM removes files that a merge has replaced
ORPHAN_GRACE_SECONDS = 3600.0
REMOVED_FILE_GRACE_SECONDS = 600.0
COMPACT_FILES = 16
COMPACT_TARGET_BYTES = 128 * MIB
COMPACT_GROUPS_TOGETHER = 64  # groups of files that one commit merges,
COMPACT_TOGETHER_BYTES = 8 * MIB  # of files of all these groups together
BUSY_BYTES_PER_SECOND = 48 * MIB
FILES_BEFORE_PATIENCE_ENDS = 2_000
COMPACT_SETTLED_SECONDS = 3600.0
COMPACT_KEYS_BYTES = 256 * MIB  # of memory for keys that are compared at a time
COMPACT_KEYS_ROWS = 1_048_576  # rows that wait to be compared
COMPACT_STEP_BYTES = 1 * GIB  # of files that one commit of a key compaction replaces
MIN_CLEANABLE_DIRTY_RATIO = 0.5
MIN_COMPACTION_LAG_MS = 0
DELETE_RETENTION_MS = 24 * 3600 * 1_000
OFFSET_MAX = 2**63 - 2**53  # the end of a mirror; int64 has offsets for the records after it
MILLISECONDS_MAX = 2**63 - 1  # an int64, as Kafka has it
STAGING_ABANDONED_SECONDS = 7 * 24 * 3600.0
SWEEP_EVERY_SECONDS = 300.0
FILES_ASKED_FOR = 8  # are checked one by one; for more, a listing is cheaper
SETTLE_EVERY_SECONDS = 60.0
UPKEEP_RETRY_SECONDS = 30.0
UPKEEP_RETRY_MAX_SECONDS = 600.0  # between attempts after repeated failures
RETENTION_EVERY_SECONDS = 60.0  # Kafka's log.retention.check.interval.ms is 5 minutes
RETENTION_SPANS = 10  # of `retention.ms`, one for each file: a record outlasts it by at most one
FILES_BEFORE_SPANS_END = 200  # of a partition; beyond, records may outlast it by more
DELETE_ATTEMPTS = 5  # when others rewrite files with deleted records
TEMPORARY_KEPT_SECONDS = 3600.0  # longer than any put takes

# ---- broker: listeners
LISTEN_BACKLOG = 1_024  # connections waiting to be accepted; the system may allow fewer

# ---- broker: the Flight listener
FLIGHT_CONNECTIONS = 2_000
FLIGHT_OTHER_CALLS = 256  # of all clients, beside streams and actions that wait
FLIGHT_ARRIVING_BYTES = 128 * MIB  # of large messages that are arriving
FLIGHT_BESIDE_BYTES = 1 * MIB  # of a message beside its batch
FLIGHT_REQUEST_BYTES = 16 * MIB  # of an action or another request
FLIGHT_DICTIONARY_BYTES = 32 * MIB  # of columns that foreign clients send with dictionaries
FLIGHT_PREFACE_SECONDS = 10.0  # for the first bytes of a connection, or of a call
FLIGHT_STREAMS = 512  # of all clients; each takes a thread, except tails
FLIGHT_TAIL_READERS = 4  # threads that read records for tails which are not in memory
FLIGHT_TAIL_STEP_BYTES = 1 * MIB  # that a tail sends before the next one has its turn
FLIGHT_TAILS_KEEPING = 8  # that wait for their clients and keep the rows of later messages
FLIGHT_TAIL_SECONDS = 0.0002  # from the step of one tail to that of the next, on average
FLIGHT_WAITING_ACTIONS = 512  # that wait for an event; each takes a thread
FLIGHT_HELD_BYTES = 256 * MIB  # of rows that clients requested and do not read
FLIGHT_FREE_ROWS_BYTES = 256 * KIB  # of such rows in each stream, which need no grant
FLIGHT_IDLE_SECONDS = 600.0  # that a stream waits for its client
FLIGHT_IDLE_SHORT_SECONDS = 5.0  # while streams or memory are scarce
FLIGHT_PRESSED_SECONDS = 5.0  # after a refusal, streams count as scarce so long

# ---- broker: the Kafka listener
KAFKA_REQUEST_MAX_BYTES = 100 * MIB  # Kafka's socket.request.max.bytes
KAFKA_PIPELINED = 16  # replies of a connection that may wait while requests are read
KAFKA_CONNECTIONS = 4_000
KAFKA_CONNECTIONS_PER_ADDRESS = 1_000
KAFKA_OTHER_FILES = 1_024  # open files of the process beside connections
KAFKA_CONTROL_THREADS = 4  # threads of each pool; a wait in one pool does not block another
KAFKA_CHANGE_THREADS = 2
KAFKA_CHECK_THREADS = 2
KAFKA_READ_THREADS = 8
KAFKA_SEEK_THREADS = 2
KAFKA_WAIT_SECONDS = 600.0  # the longest wait that a request may ask for
KAFKA_MEMORY_BYTES = 512 * MIB  # of requests and replies, of all connections
KAFKA_CONNECTION_BYTES = 32 * MIB  # of the requests of one; a larger single request is read alone
KAFKA_READ_BYTES = 32 * KIB  # that are read ahead from a connection
KAFKA_FREE_BYTES = 16 * KIB  # of a connection's requests and replies that are not counted
KAFKA_STEP_BYTES = 64 * KIB  # of an arriving request; then as much as has arrived
KAFKA_REPLY_BYTES = 32 * MIB  # of one reply without records
KAFKA_QUICK_BYTES = 32 * KIB  # of a compressed batch that is checked on the event loop
KAFKA_QUICK_RECORDS_BYTES = 256 * KIB  # decompressed; larger ones are checked on another thread
KAFKA_ITEMS = 200_000  # of all arrays of a request: topics, partitions, members, …
KAFKA_ITEM_BYTES = 1_000  # of memory for one item until it is answered
KAFKA_QUICK_ITEMS = 2_000  # are decoded on the event loop at once
KAFKA_LITTLE_ITEMS = 8  # of a request or reply; larger ones take turns on the event loop
KAFKA_TURN_SECONDS = 0.003  # that one request occupies the event loop
KAFKA_CREATED_TOPICS = 16  # that one Metadata request creates; repeated requests create more
KAFKA_BATCH_BYTES = 256 * KIB  # of a batch encoded from rows; a larger record has its own
KAFKA_MADE_BYTES = 1 * MIB  # of such batches that are encoded at a time
KAFKA_AHEAD_BYTES = 128 * MIB  # of such batches that are kept for sequential readers
KAFKA_READ_AHEAD_PARTITIONS = 64  # of a fetch that are looked at before the first is sent
KAFKA_READ_SECONDS = (
    2.0  # after which a fetch is answered with the partitions that are read by then
)
KAFKA_READ_TOGETHER = 4  # partitions of a fetch that are read from storage at the same time
KAFKA_CURSORS = 4  # sequential readers whose place in a file is kept between two fetches
KAFKA_PORTION_BATCHES = 512  # that are read at a time, unchanged
KAFKA_FEW_BATCHES = 32  # so many are sent without joining, whatever their size
KAFKA_SMALL_PIECE_BYTES = 1 * KIB  # smaller parts of batches are joined; a batch has two
KAFKA_SHORT_RECORDS_BYTES = 256 * KIB  # replies up to this size have memory of their own
KAFKA_FETCH_BYTES = 8 * MIB  # of records in one reply; a larger batch has its own reply
KAFKA_STALLED_SECONDS = 30  # that a client may leave its replies unread
KAFKA_STALLED_SHORT_SECONDS = 1  # while others wait for memory
KAFKA_SLOWEST_BYTES_PER_SECOND = 1 * MIB  # the slowest rate at which a large request may arrive
KAFKA_IDLE_SECONDS = 600  # Kafka's connections.max.idle.ms
KAFKA_WOKEN_FETCHES = 8  # that are woken in one turn of the event loop
KAFKA_WAKE_SECONDS = 0.0002  # from one such fetch to the next: about twice the time that it takes
KAFKA_WATCHED_PARTITIONS = 50_000  # of all waiting fetches, except for those of a few partitions
KAFKA_FETCH_SESSIONS = 1_000  # Kafka's max.incremental.fetch.session.cache.slots
KAFKA_FETCH_SESSION_PARTITIONS = 100_000  # of all sessions together
KAFKA_FETCH_SESSION_KEPT_SECONDS = 120.0  # that an idle session is not evicted
KAFKA_RECORD_ERRORS = 1_000  # invalid records of a batch that an error names

# ---- broker: the HTTP port for metrics
METRICS_CONNECTIONS = 32  # open at a time; further ones are closed at once
METRICS_CONNECTION_SECONDS = 15.0  # from the connect until the response is read
METRICS_REQUEST_BYTES = 16 * KIB
METRICS_KEPT_SECONDS = 1.0  # the least time between two collections, however often it is scraped
METRICS_LAG_SECONDS = 1.0  # of one collection, to read timestamps of records in tables
LAG_POSITIONS = 10_000  # of groups, about which one request asks their partitions' leader
LAG_LEADERS = 16  # that are asked at the same time
LAG_ASK_SECONDS = 0.5  # of one collection, to ask leaders
LAG_READ_SECONDS = 0.2  # in which a leader reads timestamps of records for others
METRICS_LINES = 4_096  # lines that are made at once, before other threads may run
METRICS_PARTITIONS = 64  # of one topic, whose lines are made at once
METRICS_PAUSE_SECONDS = 1e-4  # after which the next lines are made
RECORD_TIMES_REMEMBERED = 65_536
FIGURES_KEPT_SECONDS = 0.5  # likewise, for `sparklog top`
FIGURES_TOPICS = 2_000  # in an answer for `sparklog top`; those with most records
FIGURES_GROUPS = 2_000

# ---- broker: consumer groups; settings have Kafka's meaning
MIN_SESSION_TIMEOUT_MS = 6_000
MAX_SESSION_TIMEOUT_MS = 30 * 60_000
INITIAL_REBALANCE_DELAY_MS = 0  # Kafka has 3 s, and 0 in the configuration it ships for development
GROUP_SIZE = 2**31 - 1
GROUP_MEMBER_BYTES = 4 * MIB  # of a member's subscriptions, for all assignors that it offers
GROUPS_MEMBERS_BYTES = 64 * MIB  # of all groups' members: subscriptions, assignments, names
GROUP_GONE_SECONDS = 10.0  # after which a silent, disconnected member may be removed for others
NEW_MEMBER_JOIN_TIMEOUT_MS = 5 * 60_000  # for a member that has never been in a generation
OFFSETS_PARTITIONS = 8  # of `__consumer_offsets`
OFFSETS_RETENTION_MINUTES = 7 * 24 * 60
OFFSETS_RETENTION_CHECK_SECONDS = 600.0
OFFSET_METADATA_LENGTH = 4_096  # in characters of UTF-16, as Kafka's offset.metadata.max.bytes
GROUP_OFFSETS_STEP = 2_000  # offsets that are visited at a time under the coordinator's lock
GROUPS_STEP = 256  # groups, likewise

# ---- storage
CLAIM_ATTEMPTS = 8
CLAIM_BACKOFF_SECONDS = 0.1  # doubled after each attempt
CLAIM_BACKOFF_MAX_SECONDS = 2.0
DIRECT_WRITE_BYTES = 1 * MIB  # larger files bypass the page cache
DIRECT_BUFFER_BYTES = 4 * MIB
DIRECT_BUFFERS_KEPT = 4
FLUSH_THREADS = 16  # that flush the files of a joint put; more share no more of a disk's flush
PUTS_TOGETHER = 128  # objects of a joint put that are open at a time
LOCAL_PUT_ATTEMPTS = 3  # if the folder is removed meanwhile
LOCAL_FOLDERS_REMEMBERED = 65_536
STORE_REQUESTS_AT_ONCE = 32  # to an object store, of one caller
READ_AHEAD_BYTES = 16 * MIB  # of log entries that are read with the one that is needed
TABLE_REQUESTS_AT_ONCE = 4  # of one table, because many tables are read at once
REMOTE_RETRIES = 10
REMOTE_RETRY_SECONDS = 10.0
RANGE_READ_BYTES = 256 * KIB
SORT_MEMORY_BYTES = 64 * MIB  # of unsorted rows that wait in memory; others wait on disk
SORT_OFFSETS_ROWS = 1_048_576  # of a file whose offsets are read at a time
SORT_FIRST_ROWS = 65_536  # offsets that are sorted first if not all may be needed
SORT_GROWS = 4  # the factor by which that number grows
SORT_FILES_BYTES = 16 * GIB  # of another engine's files that the janitor sorts at once
FOREIGN_GROUP_BYTES = 256 * MIB  # of a row group of another engine that is not split
FILES_OPEN = 64  # files that are read at the same time
BUFFERED_GROUP_BYTES = 32 * MIB  # of a row group's column; larger ones are buffered
BUFFER_BYTES = 1 * MIB
BUFFER_REMOTE_BYTES = 8 * MIB
SMALL_FILES_AT_ONCE = 16  # that one reader asks an object store for
READ_RUN_BYTES = 16 * MIB  # of neighbouring entries, decoded, that are read as one batch

# ---- Spark
STAGED_SECTION_ROWS = 131_072
STAGED_SECTION_BYTES = 32 * MIB
STAGED_FILE_BYTES = 64 * MIB
TASK_MIN_BYTES = 4 * MIB
TASK_MAX_BYTES = 512 * MIB
TASKS_PER_CORE = 2
TASKS_MOST = 100_000  # for offsets without rows; a gap may have any number of them
STREAM_WAIT_MIN_SECONDS = 0.002
STREAM_WAIT_MAX_SECONDS = 0.2
STREAM_LOOK_SECONDS = 0.1
POLL_INTERVAL_REMOTE_SECONDS = 0.5
POLL_BLOCKS_SECONDS = 1.0
MAX_TRIGGER_DELAY_SECONDS = 15 * 60.0
SPARK_PATIENCE_SECONDS = 60.0
GROUP_REPORT_SECONDS = 1.0  # the interval at which a stream commits to a group
GROUP_REPORT_RETRY_SECONDS = 10.0  # after a failed attempt
GROUP_REPORT_AGAIN_SECONDS = 3600.0  # repeats unchanged offsets, because they expire
GROUP_REPORT_TIMEOUT_SECONDS = 10.0  # of one attempt
GROUP_REPORT_LAST_SECONDS = 5.0  # that the end of a query waits for the last one
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
INFERRED_FIELDS = 1_000  # that are new in the objects of one window, nested ones included
INFERRED_DEPTH = 16  # below it, arrays and objects are text
WINDOW_RECORDS = 5_000_000  # that a job writes to a table by one commit
WINDOWS_KEPT = 100  # plans of a job's newest windows, in its checkpoint
CONSUMER_BUFFER_BYTES = 32 * MIB
CONSUMER_POLL_ROWS = 1_000
READ_THREADS = 4
SESSION_TIMEOUT_SECONDS = 45.0  # of a member of a group, as in Kafka's consumers
GROUP_HEARTBEAT_SECONDS = 3.0
MAX_POLL_INTERVAL_SECONDS = 300.0
AUTO_COMMIT_SECONDS = 5.0
GROUP_ANSWER_SECONDS = 30.0  # beyond the time that members have to join
GROUP_CLOSE_SECONDS = 5.0  # for the last commit, and as long for leaving
METADATA_AGE_SECONDS = 30.0
ACTION_TIMEOUT_SECONDS = 30.0
PROBE_TIMEOUT_SECONDS = 3.0
KEEPALIVE_SECONDS = 10.0
KEEPALIVE_TIMEOUT_SECONDS = 5.0
BACKOFF_FIRST_SECONDS = 0.02
BACKOFF_MAX_SECONDS = 1.0
RECONNECT_MAX_SECONDS = 0.2  # while a broker is away; an attempt costs very little
RECONNECT_ATTEMPTS = 200  # about 30 s of them; a broker that is away for longer is tried less often
RETRY_LOG_SECONDS = 10.0  # between two log lines of a client about the same retries

# ---- settings: bounds of valid values
INT32_MAX = 2**31 - 1
BROKER_ID_MAX = INT32_MAX  # as in Kafka's protocol
LINGER_MAX_MS = 60_000
BUFFER_MAX_BYTES = 1 * GIB  # half the reach of the int32 offsets of an Arrow binary column
SPACE_MAX_BYTES = 1024 * GIB
INTERVAL_MAX_SECONDS = 24 * 3600
GRACE_MAX_SECONDS = 366 * 24 * 3600
COUNT_MAX = 1_000_000
