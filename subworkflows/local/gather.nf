// What things ask for by keys, each thing all of its own together: `wanted`, lists of an id and its keys.

workflow GATHER {
    take:
    wanted
    found    // key, path

    main:
    asked = wanted.collectMany { id, keys ->
        keys ? (0..<keys.size()).collect { i -> tuple(keys[i], groupKey(id, keys.size()), i) } : []
    }
    none = wanted.findAll { _id, keys -> !keys }.collect { id, _keys -> tuple(id, []) }
    gathered = channel.fromList(asked)
        .combine(found, by: 0)
        .map { _key, id, i, path -> tuple(id, [i, path]) }
        .groupTuple()
        .map { id, paths -> tuple("${id}".toString(), paths.sort { one -> one[0] }.collect { one -> one[1] }) }
        .mix(channel.fromList(none))

    emit:
    gathered   // id, paths in the order of its keys
}
