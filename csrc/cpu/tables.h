// The kernels of one instruction set, by name.
#pragma once

#include "cpu/kernels.h"
#include "cpu/vec.h"

namespace quest::cpu::QUEST_ISA {

bool finite(const Rows&, int64_t b, int64_t t, int64_t head);
void append(const AppendParams&, int64_t begin, int64_t end);
void summarise(const SummariseParams&, int64_t row, int64_t kv_head, int64_t begin, int64_t end);
void weigh(const ScoreParams&, int64_t token);
void score(const ScoreParams&, const ScoreTask& task, const ScoreTask& next);
void agree(const ScoreParams&, int64_t unit);
void pack(const PackParams&, int64_t row, int64_t kv_head, int64_t index);
void weigh_packed(const PackedScoreParams&, int64_t token);
void score_groups(const PackedScoreParams&, int64_t unit, int64_t begin, int64_t end);
void keep(const PackedScoreParams&, int64_t unit);
void score_kept(const PackedScoreParams&, int64_t unit, int64_t begin, int64_t end);
void score_open(const PackedScoreParams&, int64_t unit);
void agree_packed(const PackedScoreParams&, int64_t unit);
void select(const SelectParams&, int64_t unit);
void attend(const AttendParams&, int64_t unit, int64_t split);
void combine(const AttendParams&, int64_t unit);
void merge(const MergeParams&, int64_t begin, int64_t end);

extern const Kernels table;

}  // namespace quest::cpu::QUEST_ISA
