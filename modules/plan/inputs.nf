// Where the inputs that a row names are: relative to the sheet, else to the launch folder.

def locate(text, folder) {
    if (text.startsWith('/') || text.contains('://')) { return file(text, glob: false) }
    def beside = file("${folder}/${text}", glob: false)
    return beside.exists() ? beside : file(text, glob: false)
}

// semantic tables of a row, KIND=FILE;…: kind → text of the path
def tablesOf(row) {
    return (row.embeddings ?: '').split(';').findAll { part -> part.contains('=') }
        .collectEntries { part -> [(part.split('=', 2)[0].trim()): part.split('=', 2)[1].trim()] }
}

def isSimulated(text) {
    return text.startsWith('simulate:')
}
