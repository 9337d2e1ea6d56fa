// States of sequences: where they are, how they move on, and that nobody uses one that stands elsewhere.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>

#include "delta_net.h"

namespace paceline {
namespace {

size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

void check_shape(const DeltaShape& s) {
  if (std::min({s.layers, s.key_heads, s.value_heads, s.key_dim, s.value_dim}) < 1 || s.kernel < 2 || s.kernel > 64)
    throw std::invalid_argument("delta net: dimensions must be positive and the kernel from 2 to 64");
  if (s.key_dim > kMaxKeyDim) throw std::invalid_argument("delta net: key_dim must be at most 256");
  if (s.value_heads % s.key_heads)
    throw std::invalid_argument("delta net: value_heads must be a multiple of key_heads");
}

const DeltaShape& checked(const DeltaShape& s) {
  check_shape(s);
  return s;
}

}  // namespace

StateCache::StateCache(std::shared_ptr<ThreadPool> pool, DeltaShape shape, int slots, int journal_rows)
    : pool_(std::move(pool)),
      shape_(checked(shape)),
      slots_(slots),
      journal_rows_(journal_rows),
      history_floats_(round_up(size_t(shape.kernel - 1) * size_t(shape.channels()), 16)),
      head_floats_(round_up(size_t(shape.value_dim), kStateLanes) * size_t(shape.key_dim)),
      layer_floats_(history_floats_ + head_floats_ * size_t(shape.value_heads)),
      slot_floats_(layer_floats_ * size_t(shape.layers)),
      journal_floats_(round_up(size_t(shape.channels() + shape.keys() + shape.values() + 2 * shape.value_heads), 16)),
      slots_memory_(slot_floats_ * 4 * size_t(std::max(slots, 1))),
      journal_(journal_floats_ * 4 * size_t(shape.layers) * size_t(std::max(journal_rows, 1))),
      rows_(size_t(std::max(slots, 1)), 0) {
  if (slots < 1 || journal_rows < 1) throw std::invalid_argument("delta net: a cache needs slots and journal rows");
}

void StateCache::reset(int slot) {
  rows_.at(size_t(slot)) = 0;
  pool_->run([&](int tid) {
    const size_t begin = slot_floats_ * size_t(tid) / size_t(pool_->size()),
                 end = slot_floats_ * size_t(tid + 1) / size_t(pool_->size());
    std::memset(slot_data(slot) + begin, 0, (end - begin) * 4);
  });
}

void StateCache::copy(int from, int to) {
  rows_.at(size_t(to)) = rows_.at(size_t(from));
  if (from == to) return;
  pool_->run([&](int tid) {
    const size_t begin = slot_floats_ * size_t(tid) / size_t(pool_->size()),
                 end = slot_floats_ * size_t(tid + 1) / size_t(pool_->size());
    std::memcpy(slot_data(to) + begin, slot_data(from) + begin, (end - begin) * 4);
  });
}

void StateCache::assume(int slot, int64_t rows) { rows_.at(size_t(slot)) = rows; }

void StateCache::advance_history(float* to, const float* from, const float* x, size_t ld, int rows, int first,
                                 int width) const {
  const size_t channels = size_t(shape_.channels());
  const int before = shape_.kernel - 1;
  for (int j = 0; j < before; ++j) {  // ascending: what is read of `from` has not been written yet
    const int row = rows - before + j;
    const float* source = row >= 0 ? x + size_t(row) * ld : from + size_t(before + row) * channels + first;
    std::memmove(to + size_t(j) * channels + first, source, size_t(width) * 4);
  }
}

void StateCache::check_snapshot(const Snapshot& s, int sequences, int rows, const std::vector<bool>& taken) const {
  if (s.sequence < 0 || s.sequence >= sequences || s.rows < 1 || s.rows > rows)
    throw std::invalid_argument("snapshots: no such row of a sequence");
  if (s.slot < 0 || s.slot >= slots_ || taken[size_t(s.slot)])
    throw std::invalid_argument("snapshots: slot " + std::to_string(s.slot) + " does not exist or is in use");
}

void StateCache::check(const int32_t* slots, const int32_t* journal, const int32_t* starts, const int32_t* positions,
                       int sequences, const Snapshot* snapshots, int num_snapshots) const {
  std::vector<bool> taken(size_t(slots_), false), journalled(size_t(journal_rows_), false);
  for (int s = 0; s < sequences; ++s) {
    if (slots[s] < 0 || slots[s] >= slots_ || taken[size_t(slots[s])])
      throw std::invalid_argument("slots: every sequence needs a state of its own");
    taken[size_t(slots[s])] = true;
    if (rows_[size_t(slots[s])] != positions[starts[s]])
      throw std::invalid_argument("slots: the state has seen " + std::to_string(rows_[size_t(slots[s])]) +
                                  " rows, the pass starts at " + std::to_string(positions[starts[s]]));
    const int rows = starts[s + 1] - starts[s];
    if (journal[s] < 0) continue;
    if (journal[s] + rows > journal_rows_) throw std::invalid_argument("journal: too few rows");
    for (int i = 0; i < rows; ++i) {
      if (journalled[size_t(journal[s] + i)]) throw std::invalid_argument("journal: rows are used twice");
      journalled[size_t(journal[s] + i)] = true;
    }
  }
  for (int i = 0; i < num_snapshots; ++i) {
    const Snapshot& s = snapshots[i];
    const bool known = s.sequence >= 0 && s.sequence < sequences;
    check_snapshot(s, sequences, known ? starts[s.sequence + 1] - starts[s.sequence] : 0, taken);
    taken[size_t(s.slot)] = true;
    if (i && (s.sequence < snapshots[i - 1].sequence ||
              (s.sequence == snapshots[i - 1].sequence && s.rows <= snapshots[i - 1].rows)))
      throw std::invalid_argument("snapshots: must ascend by sequence and rows");
    if (i >= 8 && snapshots[i - 8].sequence == s.sequence)
      throw std::invalid_argument("snapshots: more than 8 of a sequence in one pass");
  }
}

void StateCache::begin() { pending_.clear(); }

void StateCache::passed(const int32_t* slots, const int32_t* journal, const int32_t* starts, int sequences,
                        const Snapshot* snapshots, int num_snapshots) {
  for (int i = 0; i < num_snapshots; ++i)
    rows_[size_t(snapshots[i].slot)] = rows_[size_t(slots[snapshots[i].sequence])] + snapshots[i].rows;
  for (int s = 0; s < sequences; ++s) {
    const int rows = starts[s + 1] - starts[s];
    if (journal[s] < 0)
      rows_[size_t(slots[s])] += rows;
    else
      pending_.push_back({slots[s], journal[s], rows});
  }
}

void StateCache::commit(const DeltaKernels& kernels, const JournalEntry* entries, int count, const Snapshot* snapshots,
                        int num_snapshots) {
  std::vector<bool> taken(size_t(slots_), false);
  for (int i = 0; i < count; ++i) {
    const JournalEntry& e = entries[i];
    const auto known = std::find_if(pending_.begin(), pending_.end(),
                                    [&](const Pending& p) { return p.slot == e.slot && p.journal == e.journal; });
    if (known == pending_.end() || e.rows < 1 || e.rows > known->rows)
      throw std::invalid_argument("commit: the last pass left no such journal");
    if (taken[size_t(e.slot)]) throw std::invalid_argument("commit: a slot is named twice");
    taken[size_t(e.slot)] = true;
  }
  for (int i = 0; i < num_snapshots; ++i) {
    const Snapshot& s = snapshots[i];
    check_snapshot(s, count, s.sequence >= 0 && s.sequence < count ? entries[s.sequence].rows : 0, taken);
    taken[size_t(s.slot)] = true;
    if (i && s.sequence <= snapshots[i - 1].sequence)
      throw std::invalid_argument("commit: at most one snapshot of a journal, in order");
  }
  const int heads = shape_.value_heads, layers = shape_.layers, channels = shape_.channels();
  std::atomic<int> next{0};
  pool_->run([&](int) {
    for (int unit; (unit = next.fetch_add(1, std::memory_order_relaxed)) < count * layers * heads;) {
      const int i = unit / (layers * heads), layer = unit / heads % layers, h = unit % heads;
      const JournalEntry& e = entries[i];
      const Snapshot* snapshot = nullptr;
      for (int j = 0; j < num_snapshots; ++j)
        if (snapshots[j].sequence == i) snapshot = &snapshots[j];
      const float* journal = this->journal(layer, e.journal);
      const float* gates = journal + channels + shape_.keys() + shape_.values() + h;
      StateCopy copy{};
      DeltaRuleArgs a{};
      a.rows = e.rows;
      a.key_dim = shape_.key_dim;
      a.value_dim = shape_.value_dim;
      a.k = journal + channels + h / (heads / shape_.key_heads) * shape_.key_dim;
      a.v = journal + channels + shape_.keys() + h * shape_.value_dim;
      a.ld = journal_floats_;
      a.decay = gates;
      a.beta = gates + heads;
      a.ld_gates = journal_floats_;
      a.state = state(e.slot, layer, h);
      if (snapshot) {
        copy = {snapshot->rows, state(snapshot->slot, layer, h)};
        a.copies = &copy;
        a.num_copies = 1;
      }
      kernels.delta_rule(a);
      // a part of the channels of the history each
      const int first = int(int64_t(channels) * h / heads), end = int(int64_t(channels) * (h + 1) / heads);
      float* past = history(e.slot, layer);
      if (snapshot)
        advance_history(history(snapshot->slot, layer), past, journal + first, journal_floats_, snapshot->rows, first,
                        end - first);
      advance_history(past, past, journal + first, journal_floats_, e.rows, first, end - first);
    }
  });
  for (int i = 0; i < num_snapshots; ++i)
    rows_[size_t(snapshots[i].slot)] = rows_[size_t(entries[snapshots[i].sequence].slot)] + snapshots[i].rows;
  for (int i = 0; i < count; ++i) {
    rows_[size_t(entries[i].slot)] += entries[i].rows;
    pending_.erase(
        std::find_if(pending_.begin(), pending_.end(), [&](const Pending& p) { return p.slot == entries[i].slot; }));
  }
}

}  // namespace paceline
