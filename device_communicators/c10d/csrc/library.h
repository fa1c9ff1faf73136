// Shares groups with the library by number, and no C++ types.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "../../cpu/csrc/queue.h"
#include "../../cpu/csrc/transfer_call.h"

namespace parallel_state {

struct Library {
  explicit Library(const std::string& path);

  using Number = std::uint64_t;
  using Word = std::uint64_t;

  void (*group_timeout)(Number, double);
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

  void* (*window_new)(Number, std::int64_t* part, const void* data);
  int (*window_open)(void*, const std::int64_t* parts);
  int (*window_put)(void*, int dst, std::int64_t first, std::int64_t elements, int dtype, const void*);
  int (*window_signal)(void*, int dst);
  int (*window_wait)(void*, int src, double timeout_s);
  int (*window_memory)(void*, int rank, void** found);
  int (*window_end)(void*);
  void (*window_delete)(void*);

  void (*transfers_delete)(void*);
  std::int64_t (*transfers_start)(void*, const TransferCall*);
  int (*transfers_wait)(void*, std::uint64_t number, double timeout_s);
  void (*transfers_interrupt)(void*, std::uint64_t number, int ends_all);
  int (*transfers_failure)(void*, std::int64_t* words);
  int (*transfers_drain)(void*, double timeout_s);
  int (*transfers_close)(void*);

  std::int64_t (*store_ask)(std::int64_t client, const char* content, std::uint64_t bytes, double timeout_s,
                            double connect_s);
  int (*store_wait)(std::int64_t request, double timeout_s);
  std::uint64_t (*store_take)(std::int64_t request, char* reply, std::uint64_t capacity);
  void (*store_end)(std::int64_t request);
  int (*has_signal)();
};

}  // namespace parallel_state
