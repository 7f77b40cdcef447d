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

// the order in which tasks end does not matter to -resume
def byName(files) {
    return files.toSorted { one, other -> one.name <=> other.name }
}
