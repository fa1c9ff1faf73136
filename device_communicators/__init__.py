"""The movement of bytes: communicators, the route that picks among them, the errors and settings of the library.

Knows nothing of tensor or pipeline parallelism; `parallel_state` is built on it and never the other way round.
"""

from device_communicators.base.public_names import name_classes as _name_classes
from device_communicators.calls.work import Work
from device_communicators.catalog import CATALOG, Row, build_route
from device_communicators.routing.communicator import REDUCE_OPS, Communicator, GroupContext, Request
from device_communicators.routing.registry import find_route, register_route, unique_name, write_record
from device_communicators.routing.route import Route, Traffic
from device_communicators.routing.started import Handle

__all__ = [
    "CATALOG", "REDUCE_OPS", "Communicator", "GroupContext", "Handle", "Request", "Route", "Row", "Traffic", "Work",
    "build_route", "find_route", "register_route", "unique_name", "write_record",
]  # fmt: skip

_name_classes(globals())
