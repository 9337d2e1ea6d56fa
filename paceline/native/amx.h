// The tile unit (AMX): whether this process may use it, and what its path has of its own. isa_amx.cpp alone is compiled
// for it, where the compiler can (PACELINE_AMX).
#pragma once
#include "kernels.h"
#include "quant.h"

namespace paceline {

// Null where this process may use tiles (the kernel was asked, once, for all threads and forked children), else why
// not: a clause about this processor, build or system. Expects a processor with avx512_bf16.
const char* amx_refused();

// Where there is PACELINE_AMX only.
void amx_gemm(const GemmArgs& g);
double amx_peak_loop(long iterations, bool f32);
void amx_attend(const AttentionArgs& p, const QueryTile& t, const int32_t* table, int p0, int p1, float* state);
void amx_finish(const AttentionArgs& p, const float* state, int row, int head);
void amx_quant_begin(int rows);
void amx_quant_end();
void amx_quant_tile(Quant format, const QuantTile& t);

}  // namespace paceline
