// How well the last token alone predicts the next: the mark a language model has to beat.
//
// Threads: any. Blocking: reads the range once. Errors: none.
#pragma once

#include "cadre/base/export.h"
#include "cadre/data/text_corpus.h"

namespace cadre {

// H(next | current) in nats of the range's own pairs: the loss of the best model that sees one
// token, fitted to this very text. So it is a lower bound for every bigram model, and a harder mark
// than one that was counted on other text. REQUIRES: at least two tokens.
CADRE_EXPORT double bigram_conditional_entropy(const TextCorpus& corpus, const TokenRange& range);

}  // namespace cadre
