"""The functions of csrc/queue_api.cpp and csrc/plain_tree.cpp, for `native`."""

from __future__ import annotations

from ctypes import POINTER, c_char_p, c_double, c_int, c_int64, c_size_t, c_uint64, c_void_p

_SHAPE = (c_void_p, c_void_p, c_uint64, c_uint64, c_int, POINTER(c_int))
_WAITING = (c_void_p, c_int64, c_int, POINTER(c_int64))
FUNCTIONS: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "ps_queue_control_bytes": (c_size_t, (c_int,)),
    "ps_liveness_new": (c_void_p, (POINTER(c_int64), c_int)),
    "ps_liveness_of": (c_void_p, (c_uint64,)),
    "ps_liveness_delete": (None, (c_void_p,)),
    "ps_queue_writer_new": (c_void_p, (*_SHAPE, *_WAITING)),
    "ps_queue_reader_new": (c_void_p, (*_SHAPE, c_int, *_WAITING)),
    "ps_queue_writer_leave": (None, (c_void_p,)),
    "ps_queue_reader_leave": (None, (c_void_p,)),
    "ps_queue_writer_delete": (None, (c_void_p,)),
    "ps_queue_reader_delete": (None, (c_void_p,)),
    "ps_queue_send": (c_int, (c_void_p, c_char_p, c_uint64, c_void_p, c_int, c_int, c_uint64, c_double)),
    "ps_queue_resume": (c_int, (c_void_p, c_double)),
    "ps_queue_next": (c_int, (c_void_p, c_void_p, c_uint64, c_double)),
    "ps_queue_read": (c_int, (c_void_p, c_void_p, c_int, c_double)),
    "ps_plain_tree": (c_int, (c_void_p, c_void_p, c_int)),
    "ps_plain_keys": (c_int, (c_char_p, c_uint64, c_uint64, c_uint64, c_int)),
    "ps_queue_here": (c_void_p, (c_void_p, POINTER(c_uint64))),
}
