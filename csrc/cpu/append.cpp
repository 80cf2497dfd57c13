// append: write K and V rows into their slots.
#include "cpu/tables.h"

namespace quest::cpu::QUEST_ISA {

static void write(const Rows& rows, const Pool& pool, int64_t b, int64_t t, int64_t slot, const AppendParams& p) {
  const int64_t size = pool.dtype == DType::f32 ? 4 : 2;
  const int64_t block = slot / p.block_size, offset = slot % p.block_size;
  const char* from = static_cast<const char*>(rows.data) + (b * rows.stride_batch + t * rows.stride_token) * size;
  char* to = static_cast<char*>(pool.data) + (block * pool.stride_block + offset * pool.stride_row) * size;
  for (int64_t h = 0; h < p.num_kv_heads; h++)
    memcpy(to + h * pool.stride_head * size, from + h * rows.stride_head * size, pool.dim * size);
}

bool finite(const Rows& rows, int64_t b, int64_t t, int64_t head) {
  bool ok = true;
  by_dtype(rows.dtype, [&](auto* type) {
    auto* x = static_cast<decltype(type)>(rows.at(b, t, head));
    for (int64_t d = 0; d < rows.dim; d++) {
      const float value = to_float(x[d]);
      ok &= value <= 1e38f && value >= -1e38f;
    }
  });
  return ok;
}

void append(const AppendParams& p, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i++) {
    const int64_t slot = p.slots[i];
    if (slot < 0 || slot >= p.num_slots) continue;
    write(p.key, p.k_cache, i / p.q_len, i % p.q_len, slot, p);
    write(p.value, p.v_cache, i / p.q_len, i % p.q_len, slot, p);
  }
}

}  // namespace quest::cpu::QUEST_ISA
