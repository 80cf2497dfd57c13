// Switching between the stacks of fibers. A switch is a function call: it keeps what a callee must preserve.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <new>

// Saves the running fiber's stack pointer to *save and goes on where the one with stack pointer `load` stopped.
extern "C" void emulator_switch(void** save, void* load);

#if defined(__x86_64__)
asm(R"(
.text
.weak emulator_switch
.hidden emulator_switch
.type emulator_switch, @function
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulator_switch, .-emulator_switch
)");
#elif defined(__aarch64__)
asm(R"(
.text
.weak emulator_switch
.hidden emulator_switch
.type emulator_switch, %function
emulator_switch:
  sub sp, sp, #160
  stp x19, x20, [sp]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size emulator_switch, .-emulator_switch
)");
#else
#error "the emulator knows x86-64 and AArch64"
#endif

#ifdef __SANITIZE_ADDRESS__
extern "C" void __asan_unpoison_memory_region(void const volatile*, size_t);
#endif

namespace emulator {

// Stacks of a block's fibers, as many as were ever needed. Memory is only taken where it is touched.
class Stacks {
 public:
  Stacks() = default;
  Stacks(const Stacks&) = delete;
  Stacks& operator=(const Stacks&) = delete;
  ~Stacks() {
    if (memory_) munmap(memory_, count_ * kSize);
  }
  void reserve(size_t count) {
    if (count <= count_) return;
    if (memory_) munmap(memory_, count_ * kSize);
    void* p = mmap(nullptr, count * kSize, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    memory_ = static_cast<char*>(p);
    count_ = count;
  }
  // A stack pointer from which the next switch enters `entry`.
  void* prepare(size_t i, void (*entry)()) {
#ifdef __SANITIZE_ADDRESS__
    __asan_unpoison_memory_region(memory_ + i * kSize, kSize);
#endif
    void** top = reinterpret_cast<void**>(memory_ + (i + 1) * kSize - 256);
#if defined(__x86_64__)
    top[1] = nullptr;  // where the entry would return to: it is entered as if called, 8 beside a multiple of 16
    top[0] = reinterpret_cast<void*>(entry);
    return top - 6;
#else
    top[-20 + 11] = reinterpret_cast<void*>(entry);  // x30
    return top - 20;
#endif
  }

 private:
  static constexpr size_t kSize = 256 << 10;
  char* memory_ = nullptr;
  size_t count_ = 0;
};

}  // namespace emulator
