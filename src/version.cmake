# Writes OUTPUT, the C file that defines what src/version.h declares, from VERSION and from FILES, paths within the folder SOURCE:
# cmake -P. The digest is that of what sha256sum prints for the sorted FILES.
list(SORT FILES)
set(listed "")
foreach(file IN LISTS FILES)
  file(SHA256 ${SOURCE}/${file} digest)
  string(APPEND listed "${digest}  ${file}\n")
endforeach()
string(SHA256 digest "${listed}")
string(SUBSTRING ${digest} 0 16 digest)
file(WRITE ${OUTPUT} "#include \"src/version.h\"

const char ps_version[] = \"${VERSION}\";
const char ps_kernel_sources[] = \"${digest}\";
")
