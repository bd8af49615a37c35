"""The settings of clients that log in, as files in the forms that they read; pure."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping

from sparklog.listeners import SASL_SSL, TLS_SCHEME
from sparklog.options import BOOTSTRAP_VARIABLE
from sparklog.security.credentials import VARIABLES
from sparklog.security.scram import Mechanism


def files_of_client(
    *, kafka: str, flight: str, user: str, password: str, ca: str, password_file: str
) -> Mapping[str, str]:
    """Returns the content of each file by its name. Those that contain the password are secret.

    Args:
        kafka: `host:port` of a Kafka listener with SASL_SSL.
        flight: `host:port` of a Flight listener with SASL_SSL.
        user: the name of the user.
        password: the user's password.
        ca: the path of the CA's PEM file on the client's machine.
        password_file: the path of a file with the password there.
    """
    mechanism = Mechanism.SHA_256.value
    common = {"bootstrap.servers": kafka, "security.protocol": SASL_SSL}
    login = f'username="{_quoted(user)}" password="{_quoted(password)}"'
    java = common | {
        "sasl.mechanism": mechanism,
        "sasl.jaas.config": (
            f"org.apache.kafka.common.security.scram.ScramLoginModule required {login};"
        ),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": ca,
    }
    librdkafka = common | {
        "sasl.mechanism": mechanism,
        "sasl.username": user,
        "sasl.password": password,
        "ssl.ca.location": ca,
    }
    python = {
        "bootstrap_servers": kafka,
        "security_protocol": SASL_SSL,
        "sasl_mechanism": mechanism,
        "sasl_plain_username": user,
        "sasl_plain_password": password,
        "ssl_cafile": ca,
    }
    variables = {
        BOOTSTRAP_VARIABLE: f"{TLS_SCHEME}{flight}",
        VARIABLES["ca"]: ca,
        VARIABLES["user"]: user,
        VARIABLES["password_file"]: password_file,
    }
    return {
        "java.properties": _properties(java),
        "librdkafka.properties": "".join(f"{name}={value}\n" for name, value in librdkafka.items()),
        "kafka-python.json": json.dumps(python, indent=2) + "\n",
        "sparklog.env": "".join(
            f"export {name}={shlex.quote(value)}\n" for name, value in variables.items()
        ),
    }


def broker_settings(
    *, root: str, certificate: str, key: str, host: str, kafka_port: int, flight_port: int
) -> str:
    """Returns a settings file of a broker whose clients log in over TLS.

    Args:
        root: the root.
        certificate: the path of its PEM file.
        key: the path of the key's PEM file.
        host: the host that clients connect to.
        kafka_port: the port for Kafka clients.
        flight_port: the port for native clients, Spark and the other brokers.
    """
    return f"""# Settings of a broker, by `sparklog security init`; conf/broker.toml explains them.
root = {json.dumps(root)}

[kafka]
listen = "SASL_SSL://0.0.0.0:{kafka_port}"
advertised = {json.dumps(f"{_bracketed(host)}:{kafka_port}")}

[flight]
listen = "SASL_SSL://0.0.0.0:{flight_port}"
advertised = {json.dumps(f"{_bracketed(host)}:{flight_port}")}

[tls]
certificate = {json.dumps(certificate)}
key = {json.dumps(key)}
"""


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _quoted(text: str) -> str:
    """Returns the text as the tokenizer of JAAS reads it within double quotes."""
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _properties(values: Mapping[str, str]) -> str:
    """Returns a file of Java properties, in which a backslash is an escape."""
    return "".join(
        f"{name}={value.replace(chr(92), chr(92) * 2)}\n" for name, value in values.items()
    )
