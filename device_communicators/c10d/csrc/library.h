// The compiled collectives of device_communicators/cpu/csrc as this library calls them: by their C interface, looked up
// in the file that the process has loaded already. So the two share groups by number, and no C++ type between builds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "../../cpu/csrc/queue.h"

namespace parallel_state {

struct Library {
  explicit Library(const std::string& path);

  using Number = std::uint64_t;
  using Word = std::uint64_t;

  void (*group_timeout)(Number, double);
  int (*group_loss)(Number, int rank, std::int64_t* reporter, std::int64_t* status);
  void (*group_doom)(Number);
  void (*wait_gently)(int);
  int (*barrier)(Number, Word, Word);
  int (*all_reduce)(Number, Word, Word, void*, const void*, std::size_t, int dtype, int op);
  int (*reduce_scatter)(Number, Word, Word, void*, const void*, std::size_t outer, std::size_t inner, int dtype,
                        int op);
  int (*all_gather)(Number, Word, Word, void*, const void*, std::size_t outer, std::size_t inner_bytes);
  int (*gatherv)(Number, Word, Word, void* const*, const std::size_t*, const void*, int dst);
  int (*broadcast)(Number, Word, Word, void*, std::size_t, int src);
  int (*scatter)(Number, Word, Word, void*, const void*, std::size_t, int src);
  int (*all_to_all)(Number, Word, Word, void*, const void*, const std::size_t* out, const std::size_t* in);

  void* (*liveness_of)(Number);
  void (*liveness_delete)(void*);
  void* (*windows_at)(void*, std::size_t offset, std::size_t bytes);
  int (*back)(void*, std::size_t, int descriptor, std::size_t offset);
  void* (*queue_writer_new)(void* control, void* data, std::uint64_t chunk_bytes, std::uint64_t chunks, int readers,
                            const int* ranks, const void* liveness, std::int64_t spin_ns, int yields, QueueReport*);
  void* (*queue_reader_new)(void* control, void* data, std::uint64_t chunk_bytes, std::uint64_t chunks, int readers,
                            const int* ranks, int me, const void* liveness, std::int64_t spin_ns, int yields,
                            QueueReport*);
  void (*queue_writer_leave)(void*);
  void (*queue_reader_leave)(void*);
  void (*queue_writer_delete)(void*);
  void (*queue_reader_delete)(void*);
  int (*queue_send)(void*, const char* head, std::uint64_t head_bytes, const Piece*, int count, int more_heads,
                    std::uint64_t fingerprint, double timeout_s);
  int (*queue_resume)(void*, double timeout_s);
  int (*queue_take)(void*, char* head, std::uint64_t capacity, const char* expected, std::uint64_t expected_bytes,
                    const Piece*, int count, double timeout_s);
  int (*queue_read)(void*, const Piece*, int count, double timeout_s);
};

}  // namespace parallel_state
