// The conditional entropy of a token given the previous one: a baseline for language models.
//
// Threads: any. Blocking: reads the range once. Errors: kInvalidArgument for a range of fewer than
// two tokens, or outside of the corpus.
#pragma once

#include "cadre/core/base/export.h"
#include "cadre/train/data/text_corpus.h"

namespace cadre {

// Returns H(next | current) in nats, computed from the frequencies of token pairs in the range
// itself. No bigram model can have a smaller loss on the range, so this is a stricter baseline than
// a bigram model that was fitted to other text.
CADRE_EXPORT double bigram_conditional_entropy(const TextCorpus& corpus, const TokenRange& range);

}  // namespace cadre
