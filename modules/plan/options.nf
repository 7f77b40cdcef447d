// Options of commands that several processes give.
// Without includes, as several scripts include it: the strict parser takes no others twice.

// semantic tables of a model; kinds: of the tables, in their order
def embeddingOptions(kinds, tables) {
    return [kinds, [tables].flatten()].transpose().collect { kind, table -> "--embedding ${kind}=${table}" }.join(' ')
}
