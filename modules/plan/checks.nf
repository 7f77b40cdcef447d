// What is checked of published data sets before their cells are read, each set of files with its recipe and split once;
// and what `stats` compares with the paper.
// Without includes, as several scripts include it: the strict parser takes no others twice.

def checkOf(store, split) {
    def recipe = split ? split.recipe : store.recipe
    def toml   = split ? split.toml : []
    def facts  = [store.inputs.join(';'), store.obs.join(';'), recipe, toml ? toml.text : '', store.genes.file] +
        [store.aliases].findAll()
    def key    = facts.join('|').md5().take(8)
    return [id: "${store.dataset}-${key}".toString(), inputs: store.inputs, obs: store.obs, toml: toml,
            aliases: store.aliases, genes: store.genes.file ?: [], recipe: recipe, fetch: store.fetch,
            before: [store.id, split?.id]]
}

// before: ids of the stores and splits that wait for it
def checksOf(units, stores) {
    def alone = stores.findAll { store -> !units.any { unit -> unit.store.id == store.id } }
    def every = units.collect { unit -> [unit.store, unit.split] } + alone.collect { store -> [store, null] }
    return every.findAll { store, _split -> store.published }
        .collect { store, split -> checkOf(store, split) }
        .groupBy { one -> one.id }
        .collect { _id, same -> same[0] + [before: same.collectMany { one -> one.before }.findAll().unique()] }
}

// what a store or a split waits for
def checksBefore(one, checks) {
    return checks.findAll { check -> one.id in check.before }.collect { check -> check.id }
}

// the data set that the paper counts, and the prior's list if the store has its genes; priors: keys of such lists
def paperOf(store, priors) {
    return [published: store.counted ?: '', listed: store.counted && store.genes.key in priors ? store.genes.key : '']
}
