// The gated delta net in plans: states of sequences, the two operations of a layer, and the commit of verified rows.
//
// A pass either moves a sequence's state on, row by row, or leaves it where it is and writes a journal of what the
// recurrence needs of each row. `commit` repeats the rows of a journal that were accepted, with the same operations in
// the same order. Journalled rows that are not committed before the next pass never happened.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "delta_kernels.h"
#include "storage.h"
#include "thread_pool.h"

namespace paceline {

struct DeltaShape {
  int layers, key_heads, value_heads, key_dim, value_dim, kernel;
  int keys() const { return key_heads * key_dim; }
  int values() const { return value_heads * value_dim; }
  int channels() const { return 2 * keys() + values(); }  // of the convolution: queries, keys, values
};

// The state behind the first `rows` rows of a sequence of the call goes to another slot as well.
struct Snapshot {
  int32_t sequence, rows, slot;
};

// One sequence whose journal is committed: its first `rows` rows, from journal row `journal` on.
struct JournalEntry {
  int32_t slot, journal, rows;
};

class StateCache {
 public:
  // Address space for `slots` states and `journal_rows` rows; memory is taken as they are first used.
  StateCache(std::shared_ptr<ThreadPool> pool, DeltaShape shape, int slots, int journal_rows);

  const DeltaShape& shape() const { return shape_; }
  int slots() const { return slots_; }
  int journal_rows() const { return journal_rows_; }
  size_t slot_bytes() const { return slot_floats_ * 4; }
  size_t journal_row_bytes() const { return journal_floats_ * 4 * size_t(shape_.layers); }
  int64_t rows(int slot) const { return rows_.at(size_t(slot)); }  // that the state has seen
  float* data(int slot) const { return slot_data(slot); }

  void reset(int slot);
  void copy(int from, int to);
  void assume(int slot, int64_t rows);  // for measurements: call it the state behind so many rows
  void commit(const DeltaKernels& kernels, const JournalEntry* entries, int count, const Snapshot* snapshots,
              int num_snapshots);

  // Of a plan's pass: positions and slots fit, else std::invalid_argument; and what the pass has done to them.
  void check(const int32_t* slots, const int32_t* journal, const int32_t* starts, const int32_t* positions,
             int sequences, const Snapshot* snapshots, int num_snapshots) const;
  void begin();
  void passed(const int32_t* slots, const int32_t* journal, const int32_t* starts, int sequences,
              const Snapshot* snapshots, int num_snapshots);

  float* history(int slot, int layer) const { return slot_data(slot) + size_t(layer) * layer_floats_; }
  float* state(int slot, int layer, int head) const {
    return history(slot, layer) + history_floats_ + size_t(head) * head_floats_;
  }
  // [channels as they came][keys and values behind the convolution][decay of heads][beta of heads]
  float* journal(int layer, int row) const {
    return reinterpret_cast<float*>(journal_.data()) +
           (size_t(layer) * size_t(journal_rows_) + size_t(row)) * journal_floats_;
  }
  size_t journal_stride() const { return journal_floats_; }
  // Channels [first, first + width) of the history behind `rows` rows x [rows, ld]; `to` may be `from`.
  void advance_history(float* to, const float* from, const float* x, size_t ld, int rows, int first, int width) const;

 private:
  struct Pending {
    int slot, journal, rows;
  };
  float* slot_data(int slot) const {
    return reinterpret_cast<float*>(slots_memory_.data()) + size_t(slot) * slot_floats_;
  }
  void check_snapshot(const Snapshot& s, int sequences, int rows, const std::vector<bool>& taken) const;

  std::shared_ptr<ThreadPool> pool_;
  const DeltaShape shape_;
  const int slots_, journal_rows_;
  size_t history_floats_, head_floats_, layer_floats_, slot_floats_, journal_floats_;
  Region slots_memory_, journal_;
  std::vector<int64_t> rows_;
  std::vector<Pending> pending_;  // journals of the last pass
};

// Parameters of one layer, [heads] unless stated.
struct DeltaLayer {
  int layer = 0;                // of the state cache
  const float* conv = nullptr;  // [kernel, channels]
  const float* rate = nullptr;  // -exp(A_log)
  const float* dt_bias = nullptr;
  const float* norm = nullptr;  // [value_dim]
  float eps = 0;
};

// The recurrent part of a pass; see Plan::forward.
struct StateBatch {
  StateCache* cache = nullptr;
  const int32_t* slots = nullptr;    // [sequences]
  const int32_t* journal = nullptr;  // [sequences] first journal row; -1: the state moves on
  const Snapshot* snapshots = nullptr;
  int num_snapshots = 0;
  const int32_t* starts = nullptr;
  int sequences = 0;
};

// Rows of a layer. mixed: [channels][gates z of values][b of heads][a of heads], projections of the normed input; b and
// a become beta and decay. rows: [channels], queries, keys and values behind the convolution; values become outputs.
struct DeltaRows {
  float* mixed;
  size_t ld_mixed;
  float* rows;
  size_t ld_rows;
  void* out;  // [values] normed and gated, as inputs of the output projection
  size_t ld_out;
  Act act;
};

// The part of thread `tid`. The second needs what all threads have done of the first.
void run_short_conv(const DeltaKernels& k, const DeltaLayer& l, const StateBatch& b, const DeltaRows& r, int tid,
                    int threads);
void run_delta_rule(const DeltaKernels& k, const DeltaLayer& l, const StateBatch& b, const DeltaRows& r, int tid,
                    int threads);

}  // namespace paceline
