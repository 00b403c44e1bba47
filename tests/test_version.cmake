# src/version.cmake on sources of the test's own: cmake -P. The digests are sha256sum's.
set(folder ${CMAKE_CURRENT_BINARY_DIR}/test_version)

function(expect files digest)
  execute_process(
    COMMAND ${CMAKE_COMMAND} -DSOURCE=${folder} -DVERSION=1.2.3 -DOUTPUT=${folder}/version.c "-DFILES=${files}" -P
            ${CMAKE_CURRENT_LIST_DIR}/../src/version.cmake COMMAND_ERROR_IS_FATAL ANY)
  file(READ ${folder}/version.c text)
  if(NOT text MATCHES "ps_version\\[\\] = \"1\\.2\\.3\";" OR NOT text MATCHES "ps_kernel_sources\\[\\] = \"${digest}\";")
    message(SEND_ERROR "${files}: not version 1.2.3 and digest ${digest}: ${text}")
  endif()
endfunction()

file(WRITE ${folder}/a.c "int a;\n")
file(WRITE ${folder}/b.cu "int b;\n")
expect("a.c;b.cu" 931f7057f440c28a)
expect("b.cu;a.c" 931f7057f440c28a) # in whatever order they are named
file(WRITE ${folder}/b.cu "int b; \n")
expect("a.c;b.cu" 89ed204ddada0de2)
file(WRITE ${folder}/b.cu "int b;\n")
file(RENAME ${folder}/b.cu ${folder}/c.cu)
expect("a.c;c.cu" e308c975eea716f2)
file(REMOVE_RECURSE ${folder})
