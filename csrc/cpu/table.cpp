// The table of one instruction set.
#include "cpu/tables.h"

#define QUEST_NAME_(x) #x
#define QUEST_NAME(x) QUEST_NAME_(x)

namespace quest::cpu::QUEST_ISA {

const Kernels table = {QUEST_NAME(QUEST_ISA), append, summarise, weigh, score, agree, select, attend, combine, merge};

}  // namespace quest::cpu::QUEST_ISA
