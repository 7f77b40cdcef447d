// Work that several tasks share: each does a part, and their outputs are joined again.
// Without includes, as several scripts include it: the strict parser takes no others twice.

// a job: meta and inputs of a task → jobs, one for each part
def spread(job, number) {
    if (number == 1) { return [job] }
    def whole = job[0]
    return (0..<number).collect { i ->
        def id = "${whole.id}.part-${i}-of-${number}".toString()
        [whole + [id: id, whole: whole.id, shard: "${i}/${number}".toString()]] + job.drop(1)
    }
}

// What things ask for by keys: `wanted`, lists of an id and its keys, `found`, a channel of key and path → a channel of
// id and its paths in that order
def gather(wanted, found) {
    def asked = wanted.collectMany { id, keys ->
        (0..<keys.size()).collect { i -> tuple(keys[i], groupKey(id, keys.size()), i) }
    }
    def none = wanted.findAll { _id, keys -> !keys }.collect { id, _keys -> tuple(id, []) }
    return channel.fromList(asked)
        .combine(found, by: 0)
        .map { _key, id, i, path -> tuple(id, [i, path]) }
        .groupTuple()
        .map { id, paths -> tuple("${id}".toString(), paths.sort { one -> one[0] }.collect { one -> one[1] }) }
        .mix(channel.fromList(none))
}

// the order in which tasks end does not matter to -resume
def byName(files) {
    return files.toSorted { one, other -> one.name <=> other.name }
}
