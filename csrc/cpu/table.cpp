// The table of one instruction set.
#include "cpu/tables.h"

#define QUEST_NAME_(x) #x
#define QUEST_NAME(x) QUEST_NAME_(x)

namespace quest::cpu::QUEST_ISA {

const Kernels table = {
    QUEST_NAME(QUEST_ISA), finite, append,     summarise,  weigh,        score,  agree,  pack,    weigh_packed,
    score_groups,          keep,   score_kept, score_open, agree_packed, select, attend, combine, merge};

}  // namespace quest::cpu::QUEST_ISA
