# What `cmake --install` puts where, and `cpack` into a Debian package (preset package). Nothing that is installed names the folder it was installed into: it can be moved as a whole.
include(CMakePackageConfigHelpers)

install(TARGETS ${PS_PROGRAMS})
install(TARGETS patchstep EXPORT PatchStepTargets)
# Beside the library, for those who have MPI: cmake --install BUILD --component mpi. The package does without, and so without MPI.
if(TARGET patchstep_mpi)
  install(TARGETS patchstep_mpi LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT mpi EXCLUDE_FROM_ALL)
endif()
install(FILES include/patchstep.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})

# For users of the library: find_package(PatchStep) and pkg-config.
set(PS_FOUND_AT ${CMAKE_INSTALL_LIBDIR}/cmake/PatchStep)
install(EXPORT PatchStepTargets NAMESPACE PatchStep:: DESTINATION ${PS_FOUND_AT})
configure_package_config_file(packaging/PatchStepConfig.cmake.in PatchStepConfig.cmake INSTALL_DESTINATION ${PS_FOUND_AT}
                              NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(PatchStepConfigVersion.cmake COMPATIBILITY SameMinorVersion) # as the SOVERSION has it
install(FILES ${CMAKE_BINARY_DIR}/PatchStepConfig.cmake ${CMAKE_BINARY_DIR}/PatchStepConfigVersion.cmake DESTINATION ${PS_FOUND_AT})
file(RELATIVE_PATH PS_PC_TO_PREFIX /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
configure_file(packaging/patchstep.pc.in patchstep.pc @ONLY)
install(FILES ${CMAKE_BINARY_DIR}/patchstep.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

# Manual pages, of what the programs print themselves.
foreach(program IN LISTS PS_PROGRAMS)
  add_custom_command(OUTPUT man/${program}.1
    COMMAND ${CMAKE_SOURCE_DIR}/packaging/manual.sh $<TARGET_FILE:${program}> ${CMAKE_SOURCE_DIR}/README.md ${PROJECT_VERSION}
            ${CMAKE_BINARY_DIR}/man/${program}.1
    DEPENDS ${program} packaging/manual.sh README.md VERBATIM)
  list(APPEND PS_PAGES ${CMAKE_BINARY_DIR}/man/${program}.1)
endforeach()
add_custom_target(manual ALL DEPENDS ${PS_PAGES})
add_dependencies(programs manual)
install(FILES ${PS_PAGES} DESTINATION ${CMAKE_INSTALL_MANDIR}/man1)

# Pictures, for which forecast looks there.
install(PROGRAMS scripts/plot.py scripts/compare.py DESTINATION ${CMAKE_INSTALL_DATADIR}/patchstep)
install(FILES scripts/runs.py DESTINATION ${CMAKE_INSTALL_DATADIR}/patchstep)

install(FILES README.md CHANGELOG.md DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR} RENAME copyright)
install(DIRECTORY configs examples DESTINATION ${CMAKE_INSTALL_DOCDIR})

set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_VENDOR "")
set(CPACK_PACKAGE_CONTACT "PatchStep <patchstep@localhost>")
set(CPACK_PACKAGE_DESCRIPTION "Trains and runs PatchTST-style forecasters of multichannel time series: programs, a C library and its header.
This build computes on the CPU.")
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION science)
set(CPACK_DEBIAN_PACKAGE_DEPENDS libopenblas0-openmp) # of the three that Debian has, the one it is built and tested with
set(CPACK_DEBIAN_PACKAGE_SUGGESTS "python3-matplotlib, python3-h5py") # for forecast --plot
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON) # Depends, of what programs and library are linked to
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS_PRIVATE_DIRS ${CMAKE_BINARY_DIR})
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS ON) # for packages that link to the library
set(CPACK_STRIP_FILES ON)
include(CPack)
