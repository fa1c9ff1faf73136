"""Moves bytes between ranks. Contains nothing about tensor or pipeline parallelism."""

from device_communicators.base.public_names import load_on_use

_NAMES = {
    "device_communicators.calls.work": ["Work"],
    "device_communicators.catalog": ["CATALOG", "Row", "build_route"],
    "device_communicators.routing.communicator": ["REDUCE_OPS", "Communicator", "GroupContext", "Request"],
    "device_communicators.routing.registry": ["find_route", "register_route", "unique_name", "write_record"],
    "device_communicators.routing.route": ["Route", "Traffic"],
    "device_communicators.routing.started": ["Handle"],
}

__all__, __getattr__ = load_on_use(globals(), _NAMES)


def __dir__() -> list[str]:
    return list(__all__)
