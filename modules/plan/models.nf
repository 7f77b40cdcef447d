// Runs with a model, and rows of mode `sample`: predictions with the model of another row, or as it was at a kept step.
// Without includes, as several scripts include it: the strict parser takes no others twice.

// what makes a bundle
def isFitted(mode) {
    return mode in ['pretrain', 'train', 'finetune']
}

// what makes something that other rows use, and no prediction
def isMaker(mode) {
    return mode in ['vocabulary', 'embed', 'import']
}

// what predicts with a bundle
def isModel(mode) {
    return mode in ['train', 'finetune', 'sample']
}

// the row whose model a row samples; null: a bundle folder's, or this is no such row
def sourceOf(row, rows) {
    return row.mode == 'sample' ? rows.find { other -> other.id == row.init && isFitted(other.mode) } : null
}

// a model is sampled on the data that it was fitted to, which its row describes; a prior, and a bundle from elsewhere,
// on those that the sample row describes
def isBound(row, rows) {
    return sourceOf(row, rows)?.mode in ['train', 'finetune']
}

// the row with what it takes from the row whose model it samples
def inherit(row, rows) {
    if (!isBound(row, rows)) { return row }
    def source = sourceOf(row, rows)
    return row + source.subMap(['preset', 'split', 'genes', 'obs', 'score_genes', 'targets']) +
        [overrides: [source.overrides, row.overrides].findAll().join(';')]
}

def stepFolder(step) {
    return "steps/${"${step}".padLeft(7, '0')}".toString()
}
