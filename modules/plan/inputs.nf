// Where the inputs that a row names are: relative to the sheet, else to the launch folder.

def locate(text, folder) {
    if (text.startsWith('/') || text.contains('://')) { return file(text, glob: false) }
    def beside = file("${folder}/${text}", glob: false)
    return beside.exists() ? beside : file(text, glob: false)
}

def isSimulated(text) {
    return text.startsWith('simulate:')
}
