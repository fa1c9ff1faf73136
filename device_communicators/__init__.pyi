# Written by `make stubs` from the table in __init__.py.
from device_communicators.calls.work import Work as Work
from device_communicators.catalog import CATALOG as CATALOG
from device_communicators.catalog import Row as Row
from device_communicators.catalog import build_route as build_route
from device_communicators.routing.communicator import REDUCE_OPS as REDUCE_OPS
from device_communicators.routing.communicator import Communicator as Communicator
from device_communicators.routing.communicator import GroupContext as GroupContext
from device_communicators.routing.communicator import Request as Request
from device_communicators.routing.registry import find_route as find_route
from device_communicators.routing.registry import register_route as register_route
from device_communicators.routing.registry import unique_name as unique_name
from device_communicators.routing.registry import write_record as write_record
from device_communicators.routing.route import Route as Route
from device_communicators.routing.route import Traffic as Traffic
from device_communicators.routing.started import Handle as Handle
