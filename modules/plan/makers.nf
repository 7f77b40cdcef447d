// Rows that make what other rows use: one gene list (vocabulary), semantic vectors (embed), a bundle from a checkpoint
// of the authors' code (import).

include { expand; overlay; parseOverrides; presetOf; readPreset; recipe } from './recipes'
include { settingOf; withStagedFiles                                    } from './recipes'
include { fetchOf; filesIn; locate; locateAll; markOf; optionsOf; tablesOf } from './inputs'

// options, and the files of those whose values are files; a model is one if there is such a folder, else a name
def optionsFor(row, rules, folder) {
    def named = optionsOf(row).findAll { name, value ->
        rules[row.mode]?.get(name) == 'file' || name == 'model' && locate("${value}", folder).isDirectory()
    }
    return [options: optionsOf(row) - named, named: named.keySet() as List,
        given: named.values().collect { name -> locate(name, folder) }]
}

def vocabularyOf(row, rows, rules, folder) {
    def settings = overlay(readPreset(presetOf(row), folder), expand(parseOverrides(row.overrides, row.dataset ?: '')))
    def added    = filesIn(row.add).collect { name -> markOf(name, rows, ['vocabulary'], folder) }
    def aliases  = settingOf(settings, 'data.gene_aliases')
    return [id: row.id, studies: filesIn(row.input).collectMany { name -> locateAll(name, folder) }, added: added,
        fetch: filesIn(row.input).collect { name -> fetchOf(name) }.findAll().unique(),
        aliases: aliases ? locate(aliases, folder) : [], recipe: recipe(withStagedFiles(settings), ['data'])] +
        optionsFor(row, rules, folder)
}

def embeddingOf(row, rules, folder) {
    return [id: row.id, names: locate(row.input, folder)] + optionsFor(row, rules, folder)
}

def importOf(row, rows, rules, folder) {
    return [id: row.id, checkpoint: locate(row.input, folder), genes: row.genes ? locate(row.genes, folder) : [],
        kinds: tablesOf(row).keySet() as List,
        tables: tablesOf(row).values().collect { name -> markOf(name, rows, ['embed'], folder) }] +
        optionsFor(row, rules, folder)
}

// rules: the options of each mode, as assets/schema_input.json has them
def makersOf(rows, rules, folder) {
    def made = { mode, make -> rows.findAll { row -> row.mode == mode }.collect { row -> make.call(row) } }
    return [
        vocabularies: made.call('vocabulary') { row -> vocabularyOf(row, rows, rules, folder) },
        embeddings: made.call('embed') { row -> embeddingOf(row, rules, folder) },
        imports: made.call('import') { row -> importOf(row, rows, rules, folder) },
    ]
}
