// Which instruction set runs: the best one that was built and that this CPU has, or the one asked for by name.
#include <atomic>
#include <cstdlib>
#include <cstring>

#include "cpu/kernels.h"

namespace quest::cpu {

#if defined(QUEST_HAVE_BASELINE)
namespace baseline {
extern const Kernels table;
}
#endif
#if defined(QUEST_HAVE_AVX2)
namespace avx2 {
extern const Kernels table;
}
#endif
#if defined(QUEST_HAVE_AVX512)
namespace avx512 {
extern const Kernels table;
}
#endif
#if defined(QUEST_HAVE_AVX512_BF16)
namespace avx512_bf16 {
extern const Kernels table;
}
#endif
#if defined(QUEST_HAVE_NEON)
namespace neon {
extern const Kernels table;
}
#endif

namespace {

struct Usable {
  const Kernels* tables[5];
  int count = 0;
  char names[64] = "";

  void add(const Kernels& k) {
    tables[count++] = &k;
    if (names[0]) strcat(names, ",");
    strcat(names, k.isa);
  }
  Usable() {
#if defined(__x86_64__)
    __builtin_cpu_init();
#endif
#if defined(QUEST_HAVE_AVX512)
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#if defined(QUEST_HAVE_AVX512_BF16)
    if (avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni")) add(avx512_bf16::table);
#endif
    if (avx512) add(avx512::table);
#endif
#if defined(QUEST_HAVE_AVX2)
    // Every CPU with AVX2 has F16C, which clang before 16 can't be asked about.
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) add(avx2::table);
#endif
#if defined(QUEST_HAVE_NEON)
    add(neon::table);
#endif
#if defined(QUEST_HAVE_BASELINE)
    add(baseline::table);
#endif
  }
};

const Usable& usable() {
  static const Usable u;
  return u;
}

std::atomic<const Kernels*> in_use{nullptr};

}  // namespace

const Kernels& kernels() {
  const Kernels* k = in_use.load(std::memory_order_relaxed);
  if (!k) in_use = k = usable().tables[0];
  return *k;
}

bool use_isa(const char* name) {
  for (int i = 0; i < usable().count; i++) {
    if (*name && strcmp(name, usable().tables[i]->isa)) continue;
    in_use = usable().tables[i];
    return true;
  }
  return false;
}

const char* isa_names() { return usable().names; }

}  // namespace quest::cpu
