"""The metric families that the broker exposes: the name, type and meaning of each.

Names, labels and types of the `kafka_…` families are those that Kafka dashboards use: those of the
JMX exporter with Strimzi's rules (`examples/metrics/kafka-metrics.yaml`), of kafka_exporter, and,
for lag in seconds, of kafka-lag-exporter. `docs/operations/metrics.md` has a line for each family.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Family(NamedTuple):
    """A metric family; `about` is its HELP line."""

    name: str
    kind: str
    about: str


_TOPICS: Final = "kafka_server_brokertopicmetrics"
_REPLICAS: Final = "kafka_server_replicamanager"
_CONTROLLER: Final = "kafka_controller_kafkacontroller"
_PARTITION: Final = "kafka_cluster_partition"
_GROUPS: Final = "kafka_coordinator_group_groupmetadatamanager"

_GAUGES: Final = {
    # The JMX exporter's, of the broker.
    f"{_REPLICAS}_leadercount": "Partitions that this broker leads.",
    f"{_REPLICAS}_partitioncount": "Partitions on this broker.",
    f"{_REPLICAS}_underreplicatedpartitions": "Always 0: the storage replicates.",
    f"{_REPLICAS}_underminisrpartitioncount": "Always 0: the storage replicates.",
    f"{_REPLICAS}_atminisrpartitioncount": "Always 0: the storage replicates.",
    f"{_REPLICAS}_offlinereplicacount": "Partitions that accept no records.",
    f"{_REPLICAS}_reassigningpartitions": "Always 0: a partition moves in one step.",
    f"{_CONTROLLER}_activecontrollercount": "1 on the broker that is the controller.",
    f"{_CONTROLLER}_activebrokercount": "Brokers that are up; 0 except on the controller.",
    f"{_CONTROLLER}_fencedbrokercount": "Always 0: brokers that are not up are not counted.",
    f"{_CONTROLLER}_offlinepartitionscount": (
        "Partitions on this broker that accept no records; on the controller, also those with a"
        " dead leader."
    ),
    f"{_CONTROLLER}_globaltopiccount": "Topics of all brokers; 0 except on the controller.",
    f"{_CONTROLLER}_globalpartitioncount": "Partitions of all topics; 0 except on the controller.",
    f"{_CONTROLLER}_preferredreplicaimbalancecount": "Always 0: any broker may lead a partition.",
    "kafka_server_kafkaserver_brokerstate": "State of the broker: 3 is running.",
    "kafka_server_kafkaserver_linux_disk_read_bytes": "Bytes that the process read from disks.",
    "kafka_server_kafkaserver_linux_disk_write_bytes": "Bytes that the process wrote to disks.",
    "kafka_server_socket_server_metrics_connection_count": "Open connections from Kafka clients.",
    "sparklog_kafka_unadmitted_connections": (
        "Connections from Kafka clients that have not completed a TLS handshake or a login."
    ),
    "kafka_server_authorizer_metrics_acls_total_count": "ACLs of the root.",
    "kafka_server_quota_byte_rate": (
        "Bytes per second of clients that have a quota; at most 100 of them, the latest."
    ),
    "kafka_network_socketserver_networkprocessoravgidle_percent": (
        "Share of time, 0 to 1, during which the Kafka listener's thread is idle."
    ),
    "kafka_server_kafkarequesthandlerpool_requesthandleravgidle_percent": (
        "The same share: one thread receives and handles requests."
    ),
    "kafka_log_logmanager_offlinelogdirectorycount": "1 once writing to the log has failed.",
    f"{_GROUPS}_numgroups": "Consumer groups.",
    f"{_GROUPS}_numgroupsempty": "Consumer groups without members.",
    f"{_GROUPS}_numgroupspreparingrebalance": "Consumer groups that wait for members to join.",
    f"{_GROUPS}_numgroupscompletingrebalance": "Consumer groups that wait for assignments.",
    f"{_GROUPS}_numgroupsstable": "Consumer groups whose members have their assignments.",
    f"{_GROUPS}_numgroupsdead": "Always 0: dead groups are removed immediately.",
    f"{_GROUPS}_numoffsets": "Committed offsets of all groups.",
    # The JMX exporter's, of each partition.
    f"{_PARTITION}_replicascount": "Always 1: the leader.",
    f"{_PARTITION}_insyncreplicascount": "Always 1: the leader.",
    f"{_PARTITION}_underreplicated": "Always 0: the storage replicates.",
    f"{_PARTITION}_underminisr": "Always 0: the storage replicates.",
    f"{_PARTITION}_atminisr": "Always 0: the storage replicates.",
    f"{_PARTITION}_laststableoffsetlag": "Always 0: there are no open transactions.",
    "kafka_log_log_size": "Bytes of a partition, in its table and in the write-ahead log.",
    "kafka_log_log_logstartoffset": "Log start offset of a partition.",
    "kafka_log_log_logendoffset": "End offset of a partition: the next one to be written.",
    "kafka_log_log_numlogsegments": "Data files of a partition.",
    # kafka_exporter's.
    "kafka_brokers": "Brokers that are up, as seen by this one.",
    "kafka_broker_info": "Information about the Kafka Broker.",
    "kafka_topic_partitions": "Number of partitions for this Topic, of those led by this broker",
    "kafka_topic_partition_current_offset": "Current Offset of a Broker at Topic/Partition",
    "kafka_topic_partition_oldest_offset": "Oldest Offset of a Broker at Topic/Partition",
    "kafka_topic_partition_leader": "Leader Broker ID of this Topic/Partition",
    "kafka_topic_partition_replicas": "Number of Replicas for this Topic/Partition",
    "kafka_topic_partition_in_sync_replica": "Number of In-Sync Replicas for this Topic/Partition",
    "kafka_topic_partition_leader_is_preferred": (
        "1 if Topic/Partition is using the Preferred Broker"
    ),
    "kafka_topic_partition_under_replicated_partition": (
        "1 if Topic/Partition is under Replicated"
    ),
    "kafka_consumergroup_current_offset": "Current Offset of a ConsumerGroup at Topic/Partition",
    "kafka_consumergroup_current_offset_sum": (
        "Current Offset of a ConsumerGroup at Topic for all partitions"
    ),
    "kafka_consumergroup_lag": "Lag of a ConsumerGroup at Topic/Partition, in offsets.",
    "kafka_consumergroup_lag_sum": "Lag of a ConsumerGroup at Topic for all partitions.",
    "kafka_consumergroup_members": "Amount of members in a consumer group",
    # kafka-lag-exporter's.
    "kafka_consumergroup_group_lag_seconds": (
        "Age of the first record that a group has not read, by the record's own timestamp."
    ),
    "kafka_consumergroup_group_max_lag_seconds": "The maximum lag of a group in seconds.",
    # sparklog's own.
    "sparklog_uptime_seconds": "Time since the broker started serving.",
    "sparklog_wal_unpublished_bytes": "Bytes of records that are not yet in their tables.",
    "sparklog_wal_oldest_unpublished_seconds": (
        "Age of the oldest record that is not yet in its table."
    ),
    "sparklog_wal_objects": (
        "Objects of the write-ahead log from the oldest still needed to the newest."
    ),
    "sparklog_wal_bytes": "Bytes of the files of all write-ahead logs below a local root.",
    "sparklog_publish_interval_seconds": (
        "The present interval between two publications of a topic, which many busy topics stretch."
    ),
    "sparklog_topic_publish_interval_seconds": (
        "Time within which records of a topic with an interval of its own are in its table."
    ),
    "sparklog_publish_lag_records": "Records of a topic that are not yet in its table.",
    "sparklog_publish_lag_seconds": (
        "Age of the oldest record of a topic that is not yet in its table."
    ),
    "sparklog_publish_process_resident_bytes": (
        "Resident memory of the publishing process; 0 without one."
    ),
    "sparklog_registry_up": "1 while the schema registry answers, 0 while it does not.",
    "sparklog_registry_conflicts": (
        "Schemas of which the registry has another text than the root; records with them wait."
    ),
    "sparklog_work_refused": "1 while the broker refuses this kind of work.",
    "sparklog_topic_held_back": "1 while the topic's table cannot be written.",
    "sparklog_topic_deletions_refused": (
        "1 while records that should be removed stay, because the topic's table is append-only."
    ),
    "sparklog_topics_held_back": "Topics whose table cannot be written.",
    "sparklog_partitions_blocked": "Partitions that accept no records.",
    "sparklog_table_files": "Data files of a topic's table.",
    "sparklog_table_small_files": "Data files smaller than half the target size of compaction.",
    "sparklog_table_bytes": "Bytes of the data files of a topic's table.",
    "sparklog_table_misfit_rows": "Records in a topic's table that do not fit its typed columns.",
    "sparklog_table_waiting_rows": (
        "Records in a topic's table whose schema is not known yet: their columns are null."
    ),
    "sparklog_table_unfilled_rows": (
        "Records in files that were written before one of the typed columns was added."
    ),
    "sparklog_compaction_debt_bytes": (
        "Bytes of small files in partitions that have enough of them to merge."
    ),
    "sparklog_write_amplification": (
        "Bytes written to tables per byte published: 1 without compaction."
    ),
    "sparklog_store_free_bytes": "Free space below the root, if known.",
    "sparklog_store_dollars_per_month": (
        "Estimated bill of the object store at the requests of the last minute, by purpose."
    ),
    "sparklog_memory_held_bytes": "Memory in use, per budget.",
    "sparklog_memory_limit_bytes": "Memory limit, per budget.",
    "sparklog_certificate_expiry_timestamp_seconds": (
        "When the certificate of the listeners expires, in seconds since 1970; absent without TLS."
    ),
    "sparklog_certificate_load_failed": (
        "1 while the files of the certificate cannot be loaded, so that the old one stays in use."
    ),
    "sparklog_flight_streams": "Open streams from native clients.",
    "sparklog_lag_seconds_unresolved": (
        "Partitions of groups whose lag in seconds could not be read in time for this scrape."
    ),
    "sparklog_scrape_seconds": "Time taken to collect these metrics.",
    "sparklog_build_info": "Always 1; the labels name the version and the broker.",
}

_COUNTERS: Final = {
    f"{_TOPICS}_messagesin_total": "Records appended.",
    f"{_TOPICS}_bytesin_total": "Bytes of appended records, as stored in the log.",
    f"{_TOPICS}_bytesout_total": "Bytes of records sent to consumers.",
    f"{_TOPICS}_totalproducerequests_total": "Batches in produce requests, also rejected ones.",
    f"{_TOPICS}_failedproducerequests_total": "Batches in produce requests that were rejected.",
    f"{_TOPICS}_totalfetchrequests_total": "Partitions in fetch requests.",
    f"{_TOPICS}_failedfetchrequests_total": "Partitions in fetch requests that received an error.",
    "kafka_controller_controllerstats_uncleanleaderelections_total": (
        "Always 0: no leader is elected without the records of its predecessor."
    ),
    f"{_REPLICAS}_isrshrinks_total": "Always 0: the storage replicates.",
    f"{_REPLICAS}_isrexpands_total": "Always 0: the storage replicates.",
    "kafka_network_requestmetrics_requests_total": "Requests from Kafka clients.",
    "kafka_network_requestmetrics_errors_total": (
        "Errors in responses to Kafka clients; for produce and fetch requests, one per partition."
    ),
    "kafka_server_socket_server_metrics_connection_creation_total": (
        "Accepted connections from Kafka clients."
    ),
    "kafka_server_socket_server_metrics_successful_authentication_total": (
        "Connections from Kafka clients that completed a TLS handshake, a login or both."
    ),
    "kafka_server_socket_server_metrics_failed_authentication_total": (
        "Connections from Kafka clients whose TLS handshake or login failed or did not end in time."
    ),
    "kafka_server_socket_server_metrics_successful_reauthentication_total": (
        "Logins of Kafka clients on connections on which they had logged in before."
    ),
    "kafka_server_socket_server_metrics_failed_reauthentication_total": (
        "Those logins that failed or did not end in time; their connections are closed."
    ),
    "kafka_server_authorizer_metrics_authorization_denied_total": (
        "Operations that no ACL allows, one for each resource that a request names, and Flight"
        " calls without a valid token; also while ACLs are only observed."
    ),
    "sparklog_audit_lines_total": "Lines of the audit file; 0 without one.",
    "sparklog_audit_lines_dropped_total": (
        "Events without a line in the audit file: too many in a second, or it cannot be written."
    ),
    "sparklog_quota_throttles_total": "How often a client was throttled, by quota.",
    "sparklog_quota_throttle_seconds_total": (
        "The times for which clients were throttled, together, by quota."
    ),
    "sparklog_publish_commits_total": "Commits of records to tables.",
    "sparklog_publish_files_total": "Data files written with new records.",
    "sparklog_publish_bytes_total": "Bytes of data files written with new records.",
    "sparklog_publish_process_cpu_seconds_total": "CPU time of publishing processes.",
    "sparklog_publish_process_starts_total": "Publishing processes started.",
    "sparklog_compaction_files_total": "Data files written to replace others.",
    "sparklog_compaction_bytes_total": "Bytes of data files written to replace others.",
    "sparklog_registry_requests_total": "Requests to the schema registry.",
    "sparklog_registry_failures_total": (
        "Requests to the schema registry without an answer that could be used."
    ),
    "sparklog_store_requests_total": "Storage operations, by kind and purpose.",
    "sparklog_store_written_bytes_total": "Bytes in puts to an object store, by purpose.",
    "sparklog_store_read_bytes_total": "Bytes read from an object store, by purpose.",
}

_OTHERS: Final = {
    "kafka_network_requestmetrics_totaltimems": (
        "summary",
        "Time in ms until a request's response is written; quantiles over about the last minute.",
    ),
    "sparklog_wal_flush_seconds": (
        "histogram",
        "Time to make a flush of the write-ahead log durable.",
    ),
    "sparklog_wal_flush_bytes": ("histogram", "Bytes of records in a flush."),
    "sparklog_event_loop_delay_seconds": (
        "histogram",
        "Delay of timers of the Kafka listener's event loop.",
    ),
}

FAMILIES: Final[dict[str, Family]] = {
    **{name: Family(name, "gauge", about) for name, about in _GAUGES.items()},
    **{name: Family(name, "counter", about) for name, about in _COUNTERS.items()},
    **{name: Family(name, kind, about) for name, (kind, about) in _OTHERS.items()},
}
"""All families by name, without those of the process (`process_…`)."""
