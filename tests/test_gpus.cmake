# kernels/cuda/gpus.cmake beside an nvidia-smi that says what each case wants: cmake -P
set(PS_ARCHITECTURES 80-real 90)
set(folder ${CMAKE_CURRENT_BINARY_DIR}/test_gpus)
set(ENV{PATH} ${folder}:$ENV{PATH})

function(expect output code wanted)
  file(WRITE ${folder}/nvidia-smi "#!/bin/sh\nprintf '${output}'\nexit ${code}\n")
  file(CHMOD ${folder}/nvidia-smi PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE)
  include(${CMAKE_CURRENT_LIST_DIR}/../kernels/cuda/gpus.cmake)
  if(NOT PS_GPUS STREQUAL wanted)
    message(SEND_ERROR "nvidia-smi says \"${output}\", exit code ${code}: \"${PS_GPUS}\", not \"${wanted}\"")
  endif()
endfunction()

expect("9.0\\n9.0\\n" 0 "90-real")
expect("8.6\\n8.9\\n" 0 "80-real") # which runs on them
expect("7.5\\n8.0\\n" 0 "80-real") # what is too old is left out
expect("7.5\\n" 0 "")
expect("8.9\\n12.0\\n" 0 "${PS_ARCHITECTURES}") # PTX
expect("8.7\\n9.0\\n" 0 "80-real;90-real")
if(EXISTS /dev/nvidia0) # a driver that does not tell
  expect("failed: 9.0\\n" 9 "${PS_ARCHITECTURES}")
else()
  expect("failed: 9.0\\n" 9 "")
endif()
file(REMOVE_RECURSE ${folder})
