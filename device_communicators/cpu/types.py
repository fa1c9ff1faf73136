"""Names of the compiled library's classes, for annotations.

At run time each name is `Any`, because groups of one rank needn't import the modules of the classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from device_communicators.cpu.host_memory import HostMemory as HostMemory
    from device_communicators.cpu.native import NativeLibrary as NativeLibrary
    from device_communicators.cpu.native_group import NativeGroup as NativeGroup
    from device_communicators.cpu.plain_tree import Form as Form
    from device_communicators.cpu.plain_tree import Packed as Packed
    from device_communicators.cpu.plain_tree import PastPython as PastPython
    from device_communicators.cpu.plain_tree import Pinned as Pinned
    from device_communicators.cpu.plain_tree import PlainObjects as PlainObjects
    from device_communicators.cpu.window import Window as Window
else:
    HostMemory = NativeLibrary = NativeGroup = Form = Packed = PastPython = Pinned = PlainObjects = Window = Any
